"""Rules for `rollout`: how the engines are split over the ranks, and which weights SGLang can hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_mega.config import LayoutConfig, RolloutConfig
from grpo_mega.config.base import divisors
from grpo_mega.preflight.fp8 import SERVED_CAPABILITY
from grpo_mega.preflight.kernels import Version
from grpo_mega.preflight.precision import rollout_block_problems
from grpo_mega.weights.layout import engine_layout_problems
from grpo_mega.weights.spec import ModelShape

CPU_ROWS = 32  # on a CPU SGLang pads the MLP's rows to a multiple of this (DEFAULT_MOE_PADDING_SIZE)


def engine_problems(rollout: RolloutConfig, layout: LayoutConfig, shape: ModelShape) -> Iterator[str]:
    """Yield problems of the engine's layout and of the weights that it receives."""
    yield from rollout_block_problems(rollout, layout, shape)
    if rollout.routing_replay and not shape.num_experts:
        yield f"rollout.routing_replay={str(rollout.routing_replay).lower()} needs a model with experts; leave it out"
    if not rollout.is_served:
        return
    for problem in engine_layout_problems(shape, rollout.tp, rollout.ep):
        yield f"rollout.{problem}"
    size, owner = (layout.engine_ranks, "engine ranks") if layout.engine_ranks else (layout.world_size, "ranks")
    if (layout.dp is not None or layout.engine_ranks) and size % rollout.tp:
        legal = ", ".join(str(d) for d in divisors(size) if d <= 64)
        yield f"rollout.tp={rollout.tp} does not divide the job's {size} {owner}; use one of {legal}"


def missing_engine_problems(rollout: RolloutConfig, *, has_sglang: bool) -> Iterator[str]:
    """Yield a problem if SGLang must generate but is not installed."""
    if rollout.is_served and not has_sglang:
        yield "rollout.engine='sglang', but SGLang is not installed; see grpo_mega/rollout/sglang/README.md, or use embedded"


def compiler_problems(rollout: RolloutConfig, compiler: Path | None) -> Iterator[str]:
    """Yield a problem if SGLang on a GPU lacks the compiler that it calls."""
    if rollout.is_served and compiler is None:
        yield (
            "rollout.engine='sglang' needs nvcc on every node, with which SGLang compiles kernels when it starts; install the "
            "CUDA toolkit, or set CUDA_HOME to where it is"
        )


def engine_rank_problems(tp: int, world_size: int, ranks_per_node: int, engine_ranks: int = 0) -> Iterator[str]:
    """Yield problems if engines of `tp` ranks do not fill the last `engine_ranks` ranks (0: all), or would span two nodes."""
    first, owner = (world_size - engine_ranks, "engine ranks") if engine_ranks else (0, "ranks")
    if (world_size - first) % tp:
        yield f"rollout.tp={tp} does not divide the job's {world_size - first} {owner}; use a divisor of it"
    elif any(leader // ranks_per_node != (leader + tp - 1) // ranks_per_node for leader in range(first, world_size, tp)):
        if not first:
            yield f"rollout.tp={tp} does not divide each node's {ranks_per_node} ranks; use a divisor of it"
            return
        yield (
            f"rollout.tp={tp}: an engine of {tp} ranks would span two nodes of {ranks_per_node} ranks, since it comes after "
            f"{first} trainer ranks; use a smaller rollout.tp, or another number of trainer ranks"
        )


def served_card_problems(rollout: RolloutConfig, dtype: str, capability: Version, name: str) -> Iterator[str]:
    """Yield problems of a server on a GPU called `name` that cannot store FP8 blocks as they are sent."""
    if rollout.quantization is None:
        return
    if capability < SERVED_CAPABILITY:
        yield (
            f"rollout.quantization={rollout.quantization!r} needs an L40, H100, H200 or later, found {name}; "
            "leave rollout.quantization out"
        )
    if dtype != "bfloat16":
        yield f"rollout.quantization={rollout.quantization!r} needs rollout.dtype=bfloat16 on a GPU, not {dtype}; set it"


def padding_problems(shape: ModelShape, tp: int) -> Iterator[str]:
    """Yield problems if SGLang would pad the model on a CPU, because a checkpoint's tensors would then not fit."""
    for rows in {shape.moe_ffn or shape.ffn, shape.ffn if shape.num_dense else 0}:
        if rows % (CPU_ROWS * tp):
            yield (
                f"SGLang pads an MLP of {rows} rows on a CPU, where rollout.tp={tp} wants a multiple of {CPU_ROWS * tp}; "
                "use rollout.engine=embedded, or another model"
            )
    if shape.num_kv_heads % tp:
        yield (
            f"SGLang pads {shape.num_kv_heads} key-value heads on a CPU, where rollout.tp={tp} does not divide them; "
            "use a divisor of them, or rollout.engine=embedded"
        )
