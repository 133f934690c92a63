"""Rules for FP8 and other dtypes: requirements on the card, the installed packages and the layout.

The FP8 recipes of Transformer Engine use different scales: `delayed` from a history of maxima, `tensorwise` from each
tensor's maximum, `blockwise` in blocks of 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3), `mxfp8` in blocks of 32
(OCP MX).
"""

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

from grpo_mega import config as configs
from grpo_mega.cli.checks.machine import Machine
from grpo_mega.config import Config, LayoutConfig, OptimizerConfig, PrecisionConfig, RolloutConfig
from grpo_mega.config.base import broken_rules
from grpo_mega.distributed.kernels import (
    DISPATCHERS,
    RECIPES,
    Version,
    as_version,
    check_apex,
    cuda_problems,
    kernel_problems,
    version_text,
)
from grpo_mega.weights.boxes import LocalTensor
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, engine_layout_problems, megatron_layout_problems
from grpo_mega.weights.spec import BLOCK, ModelShape, Row, Shard

PRECISION_AWARE: Version = (2, 1)  # first Transformer Engine with Adam moments in other dtypes
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
    yield from broken_rules(
        config,
        {
            "Transformer Engine": transformer_engine,
            "the package tensorboard": find_spec("tensorboard"),
            "the package sglang": machine.has_sglang,
        },
    )
    chosen = config.layout.token_dispatcher
    if chosen in DISPATCHERS and find_spec(DISPATCHERS[chosen]) is None:
        yield (
            f"layout.token_dispatcher={chosen}: needs the module {DISPATCHERS[chosen]}; build it from"
            " https://github.com/deepseek-ai/DeepEP (HybridEP: from its branch hybrid-ep), or leave it out"
        )
    parts = config.model.recompute_modules or ()
    if "layernorm" in parts and transformer_engine is None:  # Megatron's function for it uses names of TE
        yield (
            f"model.recompute_modules={list(parts)}: layernorm needs Transformer Engine; install it or leave"
            " layernorm out"
        )
    yield from cuda_problems(config.precision, machine.cuda)
    yield from moments_problems(config.optimizer, transformer_engine)
    check_apex()


def moments_problems(optimizer: OptimizerConfig, version: str | None) -> Iterator[str]:
    """Yield a problem if Transformer Engine, whose Adam supports moments of fewer bytes, is missing or too old."""
    if optimizer.moments_dtype != "float32" and (version is None or as_version(version) < PRECISION_AWARE):
        yield (
            f"optimizer.moments_dtype={optimizer.moments_dtype} needs Transformer Engine"
            f" {version_text(PRECISION_AWARE)} or later, found {version or 'none'}; install it, or use float32"
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
