"""What FP8 in training and in rollouts asks of machine and layout, known before anything is started; never imports torch.

Four recipes of Transformer Engine, by how they scale to the range of FP8: `delayed` by a history of maxima, `tensorwise` by
each tensor's own, `blockwise` in blocks of 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3), `mxfp8` in blocks of 32 (OCP MX).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grpo_mega.config import Config, LayoutConfig, OptimizerConfig, PrecisionConfig, RolloutConfig
from grpo_mega.errors import ConfigError
from grpo_mega.hardware.kernels import Version, as_version
from grpo_mega.weights.boxes import LocalTensor
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, check_engine_layout, check_megatron_layout
from grpo_mega.weights.spec import BLOCK, ModelShape, Row, Shard

PRECISION_AWARE: Version = (2, 1)  # since when Transformer Engine's Adam has moments of other dtypes
SERVED_CAPABILITY: Version = (8, 9)  # the least with which SGLang computes in FP8 blocks instead of repacking them


@dataclass(frozen=True)
class Needs:
    transformer_engine: Version  # since when it has the recipe
    capability: Version  # the least of a GPU's compute capability
    card: str
    length_multiple: int  # of the tokens in a micro-batch, by tensor-parallel rank
    cuda: Version = (12, 0)  # since when torch's CUDA has its products


RECIPES = {
    "delayed": Needs((1, 0), (8, 9), "an L40, H100, H200 or later", 16),
    "tensorwise": Needs((2, 2), (8, 9), "an L40, H100, H200 or later", 16),
    "blockwise": Needs((2, 3), (9, 0), "an H100, H200 or later", BLOCK, (12, 9)),
    "mxfp8": Needs((2, 1), (10, 0), "a B200 or later", 32),
}


def check_transformer_engine(precision: PrecisionConfig, found: str | None) -> None:
    """Raises ConfigError where Transformer Engine is missing, which Megatron would ignore silently, or too old."""
    if precision.fp8 is None:
        return
    if found is None:
        raise ConfigError(f"precision.fp8={precision.fp8!r} needs Transformer Engine; install it or leave precision.fp8 out")
    needed = RECIPES[precision.fp8_recipe].transformer_engine
    if as_version(found) < needed:
        raise ConfigError(
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs Transformer Engine {'.'.join(map(str, needed))}, "
            f"found {found}; "
            f"install a newer one, or use {_those(lambda needs: needs.transformer_engine <= as_version(found))}"
        )


def environment(config: Config) -> dict[str, str]:
    """Variables that Transformer Engine reads when it is imported, for those that are not set."""
    if config.precision.fp8 and config.precision.fp8_recipe == "blockwise" and config.rollout.quantization:
        # Else its scales are powers of two, and policy and engine would compute with different weights.
        return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    return {}


def check_moments(optimizer: OptimizerConfig, found: str | None) -> None:
    """Raises ConfigError where Transformer Engine, whose Adam it is, is missing or too old."""
    if optimizer.moments_dtype != "float32" and (found is None or as_version(found) < PRECISION_AWARE):
        raise ConfigError(
            f"optimizer.moments_dtype={optimizer.moments_dtype} needs Transformer Engine "
            f"{'.'.join(map(str, PRECISION_AWARE))} or later, found {found or 'none'}; install it, or use float32"
        )


def check_card(precision: PrecisionConfig, capability: Version | None, name: str) -> None:
    """Raises ConfigError for a device, called `name`, that cannot compute the recipe; `capability` is None on a CPU."""
    if precision.fp8 is None:
        return
    if capability is None:
        raise ConfigError(f"precision.fp8={precision.fp8!r} needs a GPU, and this run is on a CPU; leave precision.fp8 out")
    needs = RECIPES[precision.fp8_recipe]
    if capability < needs.capability:
        possible = _those(lambda other: other.capability <= capability)
        raise ConfigError(
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs {needs.card}, found {name}; "
            + (f"use {possible}" if possible else "leave precision.fp8 out")
        )


def check_cuda(precision: PrecisionConfig, found: str | None) -> None:
    """Raise ConfigError where torch's CUDA, of version `found`, is too old for the recipe; None: torch has none."""
    if precision.fp8 is None or found is None:
        return
    needed = RECIPES[precision.fp8_recipe].cuda
    if as_version(found) < needed:
        version = ".".join(map(str, needed))
        raise ConfigError(
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs CUDA {version}, found torch with CUDA {found}; "
            f"install torch with CUDA {version} or later, or use {_those(lambda needs: needs.cuda <= as_version(found))}"
        )


def bf16_layer_problems(precision: PrecisionConfig, layout: LayoutConfig, num_layers: int) -> Iterator[str]:
    """Yield why layers cannot stay in bf16 as configured, a line each with the remedy.

    Megatron takes no more of them at either end than one pipeline stage has layers.
    """
    if precision.fp8 is None:
        return
    most = num_layers // layout.pp
    given = {"first_layers_bf16": precision.first_layers_bf16, "last_layers_bf16": precision.last_layers_bf16}
    for name, value in given.items():
        if value > most:
            yield (
                f"precision.{name}={value}: must be at most {most}, the {num_layers} layers of the model divided by "
                f"layout.pp={layout.pp}; lower it, or lower layout.pp"
            )
    if sum(given.values()) >= num_layers:
        yield (
            f"precision.first_layers_bf16={precision.first_layers_bf16} and "
            f"last_layers_bf16={precision.last_layers_bf16} leave none of the {num_layers} layers in FP8; "
            "lower one, or leave precision.fp8 out"
        )


def check_blocks(precision: PrecisionConfig, layout: LayoutConfig, shape: ModelShape) -> None:
    """Raises ConfigError where blocks of 128 would straddle tensor-parallel ranks, or be cut short where these gather them."""
    if precision.fp8 is None or precision.fp8_recipe != "blockwise":
        return
    if layout.sequence_parallel and shape.hidden % BLOCK:
        raise ConfigError(
            f"layout.sequence_parallel=true: must have a hidden size that {BLOCK} divides with "
            f"precision.fp8_recipe='blockwise', found {shape.hidden}; leave it out, or use another recipe, such as tensorwise"
        )
    for size, what in _cut_sizes(shape):
        if size % (BLOCK * layout.tp):
            blocks = f"{size} / {BLOCK} = {size // BLOCK} blocks" if size % BLOCK == 0 else f"no whole blocks of {BLOCK}"
            legal = [tp for tp in (1, 2, 4, 8) if all(s % (BLOCK * tp) == 0 for s, _ in _cut_sizes(shape))]
            remedy = f"layout.tp={' or '.join(map(str, legal))}, or " if legal else ""
            raise ConfigError(
                f"layout.tp={layout.tp} cuts the {size} {what} ({blocks}) amid a block of precision.fp8_recipe='blockwise'; "
                f"use {remedy}another recipe, such as tensorwise"
            )


def rollout_block_problems(rollout: RolloutConfig, layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Where a block of rollout.quantization would straddle ranks of the trainer or of an engine, with the remedy."""
    if rollout.quantization is None:
        return
    sides: list[tuple[str, int, Callable[[int], str | None]]] = [
        ("layout.tp", layout.tp, lambda tp: _trainer_cut(shape, tp)),
        ("rollout.tp", rollout.tp, lambda tp: _engine_cut(shape, tp)),
    ]
    for name, tp, cut in sides if rollout.engine == "sglang" else sides[:1]:
        found = cut(tp)
        if found:
            legal = [str(other) for other in (1, 2, 4, 8, 16) if cut(other) is None]
            remedy = f"use {name}={' or '.join(legal)}, or leave" if legal else "leave"
            yield (
                f"{name}={tp} cuts {found}, amid a block of rollout.quantization={rollout.quantization!r}; "
                f"{remedy} rollout.quantization out"
            )


def check_served_card(rollout: RolloutConfig, dtype: str, capability: Version, name: str) -> None:
    """Raises ConfigError for a GPU, called `name`, on which a server cannot hold FP8 blocks as they are sent."""
    if rollout.quantization is None:
        return
    if capability < SERVED_CAPABILITY:
        raise ConfigError(
            f"rollout.quantization={rollout.quantization!r} needs an L40, H100, H200 or later, found {name}; "
            "leave rollout.quantization out"
        )
    if dtype != "bfloat16":
        raise ConfigError(
            f"rollout.quantization={rollout.quantization!r} needs model.dtype=bfloat16 on a GPU, not {dtype}; set it"
        )


def _trainer_cut(shape: ModelShape, tp: int) -> str | None:
    """Where Megatron cuts a linear layer amid a block; None if nowhere, "" if it cannot cut the model so at all."""
    try:
        check_megatron_layout(shape, MegatronLayout(tp=tp))
    except ConfigError:
        return ""
    return _cut(shape, tp, lambda row, rank: row.op.megatron(Shard(row.hf, "", shape, tp, rank)))


def _engine_cut(shape: ModelShape, tp: int) -> str | None:
    """The same of SGLang, where the parts of fused layers must begin with a block too."""
    try:
        check_engine_layout(shape, tp)
    except ConfigError:
        return ""
    return _cut(shape, tp, lambda row, rank: row.op.engine(Shard(row.hf, "", shape, tp, rank)), fused=True)


def _cut(shape: ModelShape, tp: int, held: Callable[[Row, int], LocalTensor], *, fused: bool = False) -> str | None:
    rows = [row for row in family_of(shape.model_type).rows if row.is_linear]
    for row in rows:
        sizes = dict(zip(row.hf, row.op.hf_shapes(shape), strict=True))
        for piece in (piece for rank in range(tp) for piece in held(row, rank).pieces):
            box = piece.box
            for dim, (start, offset) in enumerate(zip(box.start, piece.offset, strict=True)):
                # The boxes of a tensor cover it, so it is enough to look at where they begin.
                if start % BLOCK or (fused and offset % BLOCK):
                    size = sizes[box.tensor][dim]
                    return (
                        f"{box.tensor} at {('row', 'column')[dim]} {start} of {size} (blocks of {BLOCK}: {size / BLOCK:g})"
                        if start % BLOCK
                        else f"fused layers so that {box.tensor} begins at row {offset}"
                    )
    return None


def _cut_sizes(shape: ModelShape) -> Iterator[tuple[int, str]]:
    yield shape.q, "rows of the queries"
    yield shape.kv, "rows of the keys"
    yield (shape.moe_ffn, "rows of an expert") if shape.num_experts else (shape.ffn, "rows of the MLP")


def _those(holds: Callable[[Needs], bool]) -> str:
    return " or ".join(name for name, needs in RECIPES.items() if holds(needs))
