"""FP8 as data: what each recipe of Transformer Engine needs; never imports torch. The rules are in validation/precision.py.

The recipes differ in how they scale to the range of FP8: `delayed` by a history of maxima, `tensorwise` by each tensor's own,
`blockwise` in blocks of 128 (DeepSeek-V3, arXiv:2412.19437, section 3.3), `mxfp8` in blocks of 32 (OCP MX).
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mega.config import Config, PrecisionConfig
from grpo_mega.hardware.kernels import Version
from grpo_mega.weights.spec import BLOCK

PRECISION_AWARE: Version = (2, 1)  # the first Transformer Engine whose Adam has moments of other dtypes
SERVED_CAPABILITY: Version = (8, 9)  # the least with which SGLang computes in FP8 blocks instead of repacking them
LENGTH_MULTIPLE = 16  # of the tokens in a micro-batch per tensor-parallel rank, without FP8


@dataclass(frozen=True)
class Needs:
    transformer_engine: Version  # the first that has the recipe
    capability: Version  # the least compute capability of a GPU
    card: str
    length_multiple: int  # of the tokens in a micro-batch per tensor-parallel rank
    cuda: Version = (12, 0)  # the first CUDA that has its products


RECIPES = {
    "delayed": Needs((1, 0), (8, 9), "an L40, H100, H200 or later", 16),
    "tensorwise": Needs((2, 2), (8, 9), "an L40, H100, H200 or later", 16),
    "blockwise": Needs((2, 3), (9, 0), "an H100, H200 or later", BLOCK, (12, 9)),
    "mxfp8": Needs((2, 1), (10, 0), "a B200 or later", 32),
}


def length_multiple(precision: PrecisionConfig, tp: int) -> int:
    """Return the number whose multiples the lengths of micro-batches are padded to."""
    return (RECIPES[precision.fp8_recipe].length_multiple if precision.fp8 else LENGTH_MULTIPLE) * tp


def environment(config: Config) -> dict[str, str]:
    """Return the variables that Transformer Engine reads when it is imported, to be set unless the user has set them."""
    if config.precision.fp8 and config.precision.fp8_recipe == "blockwise" and config.rollout.quantization:
        # Otherwise its scales are powers of two, and policy and engine would compute with different weights.
        return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    return {}
