"""FP8 in blocks of 128 x 128: e4m3 values, and an fp32 scale per block that multiplies them back. Needs only torch.

This is the format of DeepSeek-V3's weights (arXiv:2412.19437, section 3.3). SGLang's `quant_method: fp8` with
`weight_block_size: [128, 128]` reads it as `weight` and `weight_scale_inv` and dequantises with `value * scale` (its
`block_quant_dequant`). The scale is amax / 448, because 448 is e4m3's largest number, so a block's largest value uses
the whole range. It is rounded like Transformer Engine's block quantiser without powers of two
(`compute_scale_from_amax`): factor = 448 / amax in fp32, value = weight * factor, scale = 1 / factor. So a trainer
whose blockwise recipe has fp32 scales (with NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1; the default is powers of two)
computes with exactly the weights that are served.

A block of zeros has factor 1. A block with a NaN or an infinity has a NaN as its scale, so it stays as broken as its
source. The factor is at most 2^126, reached below an amax of 5e-36. Otherwise the scale could be a denormal, and
kernels flush denormals to zero. The last block of rows or columns may be smaller. Blocks are independent: to quantise a
slice cut at multiples of 128 returns the same bytes as to cut the quantised tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_mega.weights.spec import BLOCK, num_blocks

VALUES, SCALES = torch.float8_e4m3fn, torch.float32
LARGEST = 448.0  # largest number of e4m3
LARGEST_FACTOR = 2.0**126
# Float32 copies of this size fit a CPU's caches, or take 64 MiB on a GPU.
_ELEMENTS_AT_ONCE = {
    "cpu": 1 << 20,
    "cuda": 1 << 22,
}


@torch.no_grad()
def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values [rows, cols] and float32 scales [ceil(rows / 128), ceil(cols / 128)] of `weight` [rows,
    cols].
    """
    rows, cols = weight.shape
    values = torch.empty((rows, cols), dtype=VALUES, device=weight.device)
    scales = torch.empty(num_blocks((rows, cols)), dtype=SCALES, device=weight.device)
    step = _rows_at_once(weight)
    for row in range(0, rows, step):
        blocks = _blocks(weight[row : row + step])
        amax = blocks.abs().amax(dim=3).amax(dim=1)
        # Not `LARGEST / amax`, because torch computes it as a product with the reciprocal.
        factor = torch.full_like(amax, LARGEST).div_(amax).clamp_(max=LARGEST_FACTOR)
        factor = torch.where((amax > 0) & amax.isfinite(), factor, 1.0)
        scaled = blocks.mul(factor[:, None, :, None]).to(VALUES)
        values[row : row + step] = scaled.view(len(factor) * BLOCK, -1)[: rows - row, :cols]
        scales[row // BLOCK : row // BLOCK + len(factor)] = torch.where(
            amax.isfinite(), factor.reciprocal_(), torch.nan
        )
    return values, scales


@torch.no_grad()
def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [rows, cols] in `dtype`: each value times its block's scale, multiplied in float32."""
    rows, cols = values.shape
    weight = torch.empty((rows, cols), dtype=dtype, device=values.device)
    step = _rows_at_once(values)
    for row in range(0, rows, step):
        blocks = _blocks(values[row : row + step])
        scale = scales[row // BLOCK : row // BLOCK + len(blocks)]
        weight[row : row + step] = (blocks * scale[:, None, :, None]).view(len(blocks) * BLOCK, -1)[: rows - row, :cols]
    return weight


def _rows_at_once(tensor: Tensor) -> int:
    return BLOCK * max(1, _ELEMENTS_AT_ONCE[tensor.device.type] // (BLOCK * tensor.shape[1]))


def _blocks(part: Tensor) -> Tensor:
    """Return float32 [blocks of rows, 128, blocks of columns, 128]. Smaller last blocks are padded with zeros."""
    part = part.to(SCALES)
    rows, cols = part.shape
    if rows % BLOCK or cols % BLOCK:
        part = F.pad(part, (0, -cols % BLOCK, 0, -rows % BLOCK))
    return part.reshape(part.shape[0] // BLOCK, BLOCK, part.shape[1] // BLOCK, BLOCK)
