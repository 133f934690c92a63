"""SGLang server requirements for the model, the GPU and the machine. Imports neither SGLang nor torch."""

from collections.abc import Iterator
from pathlib import Path

from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.kernels import Version
from grpo_mega.weights.spec import ModelShape

SERVED_CAPABILITY: Version = (8, 9)  # lowest capability if SGLang must compute in FP8 blocks without repacking
CPU_ROWS = 32  # on a CPU SGLang pads MLP rows to this multiple (DEFAULT_MOE_PADDING_SIZE)


def compiler_problems(rollout: RolloutConfig, compiler: Path | None) -> Iterator[str]:
    """Yield a problem if SGLang on a GPU lacks the compiler that it calls."""
    if rollout.is_served and compiler is None:
        yield (
            "rollout.engine='sglang' needs nvcc on every node, with which SGLang compiles kernels when it starts;"
            " install the CUDA toolkit, or set CUDA_HOME to where it is"
        )


def served_card_problems(rollout: RolloutConfig, dtype: str, capability: Version, name: str) -> Iterator[str]:
    """Yield problems if a server on the GPU `name` cannot store FP8 blocks as they are sent."""
    if rollout.quantization is None:
        return
    if capability < SERVED_CAPABILITY:
        yield (
            f"rollout.quantization={rollout.quantization!r} needs an L40, H100, H200 or later, found {name}; "
            "leave rollout.quantization out"
        )
    if dtype != "bfloat16":
        yield (
            f"rollout.quantization={rollout.quantization!r} needs rollout.dtype=bfloat16 on a GPU, not {dtype}; set it"
        )


def padding_problems(shape: ModelShape, tp: int) -> Iterator[str]:
    """Yield problems if SGLang would pad the model on a CPU, because a checkpoint's tensors would then not fit."""
    for rows in {shape.moe_ffn or shape.ffn, shape.ffn if shape.num_dense else 0}:
        if rows % (CPU_ROWS * tp):
            yield (
                f"SGLang pads an MLP of {rows} rows on a CPU, where rollout.tp={tp} wants a multiple of"
                f" {CPU_ROWS * tp}; use rollout.engine=embedded, or another model"
            )
    if shape.num_kv_heads % tp:
        yield (
            f"SGLang pads {shape.num_kv_heads} key-value heads on a CPU, where rollout.tp={tp} does not divide them; "
            "use a divisor of them, or rollout.engine=embedded"
        )
