"""The requirements of each FP8 recipe of Transformer Engine. Never imports torch. The rules are in preflight/precision.py.

The recipes use different scales: `delayed` from a history of maxima, `tensorwise` from each tensor's maximum, `blockwise` in
blocks of 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3), `mxfp8` in blocks of 32 (OCP MX).
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.config import Config, PrecisionConfig
from grpo_mega.preflight.kernels import Version
from grpo_mega.weights.spec import BLOCK

PRECISION_AWARE: Version = (2, 1)  # first Transformer Engine with Adam moments in other dtypes
SERVED_CAPABILITY: Version = (8, 9)  # lowest capability if SGLang must compute in FP8 blocks without repacking
LENGTH_MULTIPLE = 16  # without FP8, tokens per tensor-parallel rank in a micro-batch are padded to this multiple


@dataclass(frozen=True)
class Needs:
    transformer_engine: Version  # first version with the recipe
    capability: Version  # lowest compute capability of a GPU
    card: str
    length_multiple: int  # tokens per tensor-parallel rank in a micro-batch are padded to this multiple
    cuda: Version = (12, 0)  # first CUDA with the recipe's matrix products


RECIPES = {
    "delayed": Needs((1, 0), (8, 9), "an L40, H100, H200 or later", 16),
    "tensorwise": Needs((2, 2), (8, 9), "an L40, H100, H200 or later", 16),
    "blockwise": Needs((2, 3), (9, 0), "an H100, H200 or later", BLOCK, (12, 9)),
    "mxfp8": Needs((2, 1), (10, 0), "a B200 or later", 32),
}


def length_multiple(precision: PrecisionConfig, tp: int) -> int:
    """Return the multiple to which micro-batch lengths are padded."""
    return (RECIPES[precision.fp8_recipe].length_multiple if precision.fp8 else LENGTH_MULTIPLE) * tp


def environment(config: Config) -> dict[str, str]:
    """Return the variables that Transformer Engine reads at import. Set them unless the user has set them."""
    if config.precision.fp8 and config.precision.fp8_recipe == "blockwise" and config.rollout.quantization:
        # Otherwise scales are powers of two, and policy and engine would compute with different weights.
        return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    return {}
