"""Rules for FP8 and other dtypes: requirements on the card, the installed packages and the layout.

The FP8 recipes of Transformer Engine use different scales: `delayed` from a history of maxima, `tensorwise` from each
tensor's maximum, `blockwise` in blocks of 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3), `mxfp8` in blocks of 32
(OCP MX).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from grpo_mega import config as configs
from grpo_mega.config import Config, LayoutConfig, OptimizerConfig, PrecisionConfig, RolloutConfig
from grpo_mega.preflight.machine import (
    FLASH_ATTENTION,
    FUSED_PACKED,
    PACKED_A2A,
    UNFUSED_PACKED,
    Machine,
    Version,
    as_version,
    check_apex,
    version_text,
)
from grpo_mega.weights.boxes import LocalTensor
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, engine_layout_problems, megatron_layout_problems
from grpo_mega.weights.spec import BLOCK, ModelShape, Row, Shard

PRECISION_AWARE: Version = (2, 1)  # first Transformer Engine with Adam moments in other dtypes
SERVED_CAPABILITY: Version = (8, 9)  # lowest capability if SGLang must compute in FP8 blocks without repacking
# Settings -> variables that contradict them (Transformer Engine 2.9 to 2.20.0.dev0, SGLang 0.5.21).
_CONTRADICTIONS = {
    "NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0": "NVTE_UNFUSED_ATTN=0",  # no attention is left
    r"model.dtype=float32": r"NVIDIA_TF32_OVERRIDE=(?!0?$).*",
    # It replaces the recipe's backward pass. Transformer Engine reads it when it defines its recipes.
    r"precision.fp8=(?!None)\S+ precision.fp8_recipe=\S+": r"NVTE_BACKWARD_OVERRIDE=.*",
    # Policy and engine would compute with different scales.
    r"precision.fp8=(?!None)\S+ precision.fp8_recipe=blockwise rollout.quantization=(?!None)\S+": (
        r"NVTE_FP8_BLOCK_SCALING_FP32_SCALES=(?!1$).*"
    ),
    # SGLang would return log-probs at temperature 1.
    r"rollout.engine=sglang rollout.temperature=(?!1.0 )\S+": r"SGLANG_RETURN_ORIGINAL_LOGPROB=(?i:1|true|yes|y)",
    r"DETERMINISTIC=1": r"NVTE_ALLOW_NONDETERMINISTIC_ALGO=(?!0$).*|CUBLAS_WORKSPACE_CONFIG=(?!:4096:8$|:16:8$).*",
}
LENGTH_MULTIPLE = 16  # without FP8, tokens per tensor-parallel rank in a micro-batch are padded to this multiple


@dataclass(frozen=True)
class Needs:
    transformer_engine: Version  # first version with the recipe
    capability: Version  # lowest compute capability of a GPU
    card: str
    length_multiple: int  # tokens per tensor-parallel rank in a micro-batch are padded to this multiple
    cuda: Version = (12, 0)  # first CUDA with the recipe's matrix products
    end: Version = (99, 0)  # first compute capability without the recipe


RECIPES = {
    "delayed": Needs((1, 0), (8, 9), "an L40, H100, H200 or later", 16),
    "tensorwise": Needs((2, 2), (8, 9), "an L40, H100, H200 or later", 16),
    "blockwise": Needs((2, 3), (9, 0), "an H100, H200 or later", BLOCK, (12, 9)),
    "mxfp8": Needs((2, 1), (10, 0), "a B200, GB200 or B300", 32, (12, 8), (11, 0)),
}


def resolve_dtype(config: Config, is_gpu: bool, recorded: str | None = None) -> tuple[Config, str | None]:
    """Return the config with a model.dtype, and a note for the user if the config left it unset.

    It is then the `recorded` one of the run that is resumed, or else one for the device. Raise ConfigError if another
    key does not fit it.
    """
    if config.model.dtype is not None:
        return config, None
    dtype, reason = ("bfloat16", "on GPUs") if is_gpu else ("float32", "on a CPU")
    dtype, reason = (dtype, f"this job runs {reason}") if recorded is None else (recorded, "the run started with it")
    raw = config.model_dump(mode="json")
    raw["model"]["dtype"] = dtype
    return configs.validate(raw), f"model.dtype={dtype}, because it is not set and {reason}"


def length_multiple(precision: PrecisionConfig, tp: int) -> int:
    """Return the multiple to which micro-batch lengths are padded."""
    return (RECIPES[precision.fp8_recipe].length_multiple if precision.fp8 else LENGTH_MULTIPLE) * tp


def environment(config: Config) -> dict[str, str]:
    """Return the variables that Transformer Engine reads at import. Set them unless the user has set them."""
    if config.precision.fp8 and config.precision.fp8_recipe == "blockwise" and config.rollout.quantization:
        # Otherwise scales are powers of two, and policy and engine would compute with different weights.
        return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    return {}


def variable_problems(config: Config) -> Iterator[str]:
    """Yield variables of a shell that contradict the config or each other. They would change numbers silently."""
    settings = (
        f"model.dtype={config.model.dtype} DETERMINISTIC={os.environ.get('DETERMINISTIC')}"
        f" precision.fp8={config.precision.fp8} precision.fp8_recipe={config.precision.fp8_recipe}"
        f" rollout.quantization={config.rollout.quantization} rollout.engine={config.rollout.engine}"
        f" rollout.temperature={config.rollout.temperature}"
        f" NVTE_FLASH_ATTN={os.environ.get('NVTE_FLASH_ATTN')} NVTE_FUSED_ATTN={os.environ.get('NVTE_FUSED_ATTN')}"
    )
    for pattern, variable in _CONTRADICTIONS.items():
        setting = re.search(pattern, settings)
        for name, value in os.environ.items():
            if setting and re.fullmatch(variable, f"{name}={value}"):
                yield f"{name}={value}: contradicts {setting[0]}; unset it"


def installed_problems(config: Config, machine: Machine) -> Iterator[str]:
    """Yield requirements that the installed packages miss."""
    transformer_engine = machine.transformer_engine
    yield from kernel_problems(config, *machine.gpu(config.device), transformer_engine, machine.flash_attention)
    for name in ("grouped_experts", "fused_permutation"):
        if getattr(config.model, name) and transformer_engine is None:
            yield f"model.{name}=true needs Transformer Engine; install it or leave {name} out"
    parts = config.model.recompute_modules or ()
    if "layernorm" in parts and transformer_engine is None:  # Megatron's function for it uses names of TE
        yield (
            f"model.recompute_modules={list(parts)}: layernorm needs Transformer Engine; install it or leave"
            " layernorm out"
        )
    yield from cuda_problems(config.precision, machine.cuda)
    yield from moments_problems(config.optimizer, transformer_engine)
    check_apex()


def kernel_problems(
    config: Config, capability: Version | None, name: str, transformer_engine: str | None, flash_attn: str | None
) -> Iterator[str]:
    """Yield what Transformer Engine lacks on a GPU called `name`. Without a `capability` the GPU is not known."""
    yield from transformer_engine_problems(config.precision, transformer_engine)
    yield from exchange_problems(config.layout, transformer_engine)
    if capability is not None:
        yield from attention_problems(config.model.resolved_dtype, capability, name, transformer_engine, flash_attn)


def transformer_engine_problems(precision: PrecisionConfig, version: str | None) -> Iterator[str]:
    """Yield problems if Transformer Engine does not support the recipe. Megatron would silently ignore a missing
    one.
    """
    if precision.fp8 is None:
        return
    needed = RECIPES[precision.fp8_recipe].transformer_engine
    if version is None:
        yield f"precision.fp8={precision.fp8!r} needs Transformer Engine; install it or leave precision.fp8 out"
    elif as_version(version) < needed:
        yield (
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs Transformer Engine {version_text(needed)}, found"
            f" {version}; install a newer one, or use"
            f" {_recipes(lambda needs: needs.transformer_engine <= as_version(version))}"
        )


def exchange_problems(layout: LayoutConfig, version: str | None) -> Iterator[str]:
    """Yield a problem if Transformer Engine of `version` (None: not installed) cannot exchange packed samples like
    this.
    """
    if layout.cp > 1 and layout.cp_comm_type == "a2a" and version is not None and as_version(version) < PACKED_A2A:
        yield (
            f"layout.cp_comm_type=a2a: must have Transformer Engine {version_text(PACKED_A2A)} or later for packed"
            f" samples, found {version}; install a newer one, or use p2p"
        )


def cuda_problems(precision: PrecisionConfig, version: str | None) -> Iterator[str]:
    """Yield problems if torch's CUDA is too old for the recipe. `version` is None if torch has no CUDA."""
    if precision.fp8 is None or version is None:
        return
    needed = RECIPES[precision.fp8_recipe].cuda
    if as_version(version) < needed:
        yield (
            f"precision.fp8_recipe={precision.fp8_recipe!r} needs CUDA {version_text(needed)}, found torch with CUDA"
            f" {version}; install torch with CUDA {version_text(needed)} or later, or use"
            f" {_recipes(lambda needs: needs.cuda <= as_version(version))}"
        )


def moments_problems(optimizer: OptimizerConfig, version: str | None) -> Iterator[str]:
    """Yield a problem if Transformer Engine, whose Adam supports moments of fewer bytes, is missing or too old."""
    if optimizer.moments_dtype != "float32" and (version is None or as_version(version) < PRECISION_AWARE):
        yield (
            f"optimizer.moments_dtype={optimizer.moments_dtype} needs Transformer Engine"
            f" {version_text(PRECISION_AWARE)} or later, found {version or 'none'}; install it, or use float32"
        )


def attention_problems(
    dtype: str, capability: Version, name: str, transformer_engine: str | None, flash_attn: str | None
) -> Iterator[str]:
    """Yield problems if Transformer Engine has no attention for packed samples on a GPU called `name`.

    Its fused attention supports them in bf16 from compute capability 9.0 on. Its unfused attention supports any dtype
    since version 2.11, but stores every score. So flash-attn is required below 9.0 for every version.
    """
    if transformer_engine is None:
        return
    if dtype == "float32" and as_version(transformer_engine) < UNFUSED_PACKED:
        yield (
            f"model.dtype=float32: on a GPU must have Transformer Engine {version_text(UNFUSED_PACKED)} or later, the"
            f" first with an attention for it, found {transformer_engine}; install a newer one, or use"
            " model.dtype=bfloat16"
        )
    has_flash = flash_attn is not None and as_version(flash_attn) >= FLASH_ATTENTION
    if dtype == "bfloat16" and capability < FUSED_PACKED and not has_flash:
        yield (
            f"device={name!r}: must have compute capability 9.0 (an H100 or later) for Transformer Engine's fused"
            f" attention of packed samples, found {version_text(capability)} and"
            f" {f'flash-attn {flash_attn}' if flash_attn else 'no flash-attn'}; pip install"
            f" 'flash-attn>={version_text(FLASH_ATTENTION)}'"
        )


def latent_problems(shape: ModelShape, capability: Version | None, name: str) -> Iterator[str]:
    """Yield a problem if Transformer Engine has no fast attention for a model's latents on a GPU called `name`.

    Its fused attention supports packed samples from compute capability 9.0 on, and heads of different widths for keys
    and values only up to 128, or as DeepSeek's 192 and 128. flash-attn 2 does not support different widths.
    """
    if not shape.kv_lora or capability is None:
        return
    remedy = "pip uninstall transformer-engine to train with Megatron's local layers"
    if capability < FUSED_PACKED:
        yield (
            f"device={name!r}: must have compute capability 9.0 (an H100 or later) for {shape.model_type} with"
            f" Transformer Engine, found {version_text(capability)}; {remedy}"
        )
    widths = shape.head_dim, shape.v_dim
    if widths != (192, 128) and max(widths) > (256 if widths[0] == widths[1] else 128):
        yield (
            f"config.json has heads of {widths[0]} for keys and {widths[1]} for values: must be 192 and 128, equal up"
            f" to 256, or at most 128 for Transformer Engine; {remedy}"
        )


def card_problems(precision: PrecisionConfig, capability: Version | None, name: str) -> Iterator[str]:
    """Yield problems if a device called `name` cannot compute the recipe; `capability` is None on a CPU."""
    if precision.fp8 is None:
        return
    needs = RECIPES[precision.fp8_recipe]
    if capability is None:
        yield f"precision.fp8={precision.fp8!r} needs a GPU, and this run is on a CPU; leave precision.fp8 out"
    elif not needs.capability <= capability < needs.end:
        possible = _recipes(lambda other: other.capability <= capability < other.end)
        yield f"precision.fp8_recipe={precision.fp8_recipe!r} needs {needs.card}, found {name}; " + (
            f"use {possible}" if possible else "leave precision.fp8 out"
        )


def bf16_layer_problems(precision: PrecisionConfig, layout: LayoutConfig, num_layers: int) -> Iterator[str]:
    """Yield the reasons why layers cannot stay in bf16. At each end Megatron allows at most one pipeline stage of
    them.
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


def block_problems(precision: PrecisionConfig, layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Yield problems if blocks would span tensor-parallel ranks, or would be cut short by the ranks' gather.

    In blocks of 32 every width must be a multiple of 32.
    """
    recipe = precision.fp8_recipe
    if precision.fp8 is None or recipe not in ("blockwise", "mxfp8"):
        return
    block = RECIPES[recipe].length_multiple
    widths = {"hidden": shape.hidden, "query latent": shape.q_lora, "key latent": shape.kv_lora}
    for name, width in widths.items():
        if recipe == "mxfp8" and width % block:
            yield (
                f"precision.fp8_recipe='mxfp8': must have a {name} size that {block} divides, found {width}; use"
                " another recipe, such as tensorwise"
            )
            return
    if layout.sequence_parallel and shape.hidden % block:
        yield (
            f"layout.sequence_parallel=true: must have a hidden size that {block} divides with"
            f" precision.fp8_recipe={recipe!r}, found {shape.hidden}; leave it out, or use another recipe, such as"
            " tensorwise"
        )
    sizes = [(shape.q, "rows of the queries")]
    if shape.kv_lora:
        sizes += [(shape.kv_up, "rows of keys and values"), (shape.v, "columns of attention's output")]
    else:
        sizes.append((shape.kv, "rows of the keys"))
    if shape.shared_ffn:
        sizes.append((shape.shared_ffn, "rows of the shared experts"))
    if not shape.num_experts or shape.num_dense > precision.first_layers_bf16:
        sizes.append((shape.ffn, "rows of the MLP"))
    legal = [str(tp) for tp in (1, 2, 4, 8) if all(size % (block * tp) == 0 for size, _ in sizes)]
    cut = [("tp", layout.tp, size, rows) for size, rows in sizes]
    if shape.num_experts:
        cut.append(("etp", layout.etp, shape.moe_ffn, "rows of an expert"))
    for axis, parts, size, rows in cut:
        if size % (block * parts) == 0:
            continue
        blocks = f"{size} / {block} = {size // block} blocks" if size % block == 0 else f"no whole blocks of {block}"
        other = f"layout.tp={' or '.join(legal)}, or " if legal and axis == "tp" else ""
        if rows == "rows of the MLP" and shape.num_experts:
            other += f"precision.first_layers_bf16={shape.num_dense}, or "
        yield (
            f"layout.{axis}={parts} cuts the {size} {rows} ({blocks}) inside a block of"
            f" precision.fp8_recipe={recipe!r}; use {other}another recipe, such as tensorwise"
        )
        return  # one remedy fixes all sizes


def rollout_block_problems(rollout: RolloutConfig, layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Yield problems if a block of rollout.quantization would span ranks of the trainer or of an engine."""
    if rollout.quantization is None:
        return
    sides: list[tuple[str, int, Callable[[ModelShape, int], str | None]]] = [
        ("layout.tp", layout.tp, partial(_trainer_cut, etp=layout.etp)),
        ("rollout.tp", rollout.tp, partial(_engine_cut, ep=rollout.ep)),
    ]
    for key, tp, cut in sides if rollout.is_served else sides[:1]:
        place = cut(shape, tp)
        if place:
            legal = [str(other) for other in (1, 2, 4, 8, 16) if cut(shape, other) is None]
            remedy = f"use {key}={' or '.join(legal)}, or leave" if legal else "leave"
            if key == "rollout.tp" and shape.num_experts and _engine_cut(shape, tp, ep=tp) is None:
                remedy = f"use rollout.ep={tp}, or leave"
            yield (
                f"{key}={tp} cuts {place}, inside a block of rollout.quantization={rollout.quantization!r}; "
                f"{remedy} rollout.quantization out"
            )


def _trainer_cut(shape: ModelShape, tp: int, etp: int) -> str | None:
    """Return where Megatron splits a linear layer inside a block; None if nowhere, "" if it cannot split the model at
    all.
    """
    if any(megatron_layout_problems(shape, MegatronLayout(tp=tp, etp=etp))):
        return ""

    def held(row: Row, rank: int) -> LocalTensor:
        parts = etp if row.kind == "expert" else tp
        return row.op.megatron(Shard(row.hf, "", shape, parts, rank % parts))

    return _cut(shape, tp, held)


def _engine_cut(shape: ModelShape, tp: int, ep: int) -> str | None:
    """Return the same for SGLang. The parts of its fused layers must start with a block, too."""
    if any(engine_layout_problems(shape, tp, ep)):
        return ""

    def held(row: Row, rank: int) -> LocalTensor:
        parts = tp // ep if row.kind == "expert" else tp
        return row.op.engine(Shard(row.hf, "", shape, parts, rank % parts))

    return _cut(shape, tp, held, fused=True)


def _cut(shape: ModelShape, tp: int, held: Callable[[Row, int], LocalTensor], *, fused: bool = False) -> str | None:
    for row in family_of(shape.model_type).linear_rows(shape):
        sizes = dict(zip(row.hf, row.op.hf_shapes(shape), strict=True))
        for piece in (piece for rank in range(tp) for piece in held(row, rank).pieces):
            box = piece.box
            for dim, (start, offset) in enumerate(zip(box.start, piece.offset, strict=True)):
                # The boxes of a tensor cover it, so it is enough to check their starts.
                if start % BLOCK:
                    size = sizes[box.tensor][dim]
                    return (
                        f"{box.tensor} at {('row', 'column')[dim]} {start} of {size} (blocks of {BLOCK}:"
                        f" {size / BLOCK:g})"
                    )
                if fused and offset % BLOCK:
                    return f"fused layers so that {box.tensor} starts at row {offset}"
    return None


def _recipes(holds: Callable[[Needs], bool]) -> str:
    return " or ".join(name for name, needs in RECIPES.items() if holds(needs))
