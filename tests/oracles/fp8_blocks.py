"""The test oracle of weights/apply.py: one block after another, simple enough to check by eye."""

from __future__ import annotations

import torch
from torch import Tensor


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values [rows, cols] and float32 scales [ceil(rows / 128), ceil(cols / 128)] of `weight` [rows,
    cols].
    """
    rows, cols = weight.shape
    values = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-rows // 128), -(-cols // 128), dtype=torch.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            block = weight[place].to(torch.float32)
            amax = block.abs().max()
            factor = torch.tensor(1.0)
            if 0 < amax < torch.inf:
                factor = min(torch.tensor(448.0) / amax, torch.tensor(2.0**126))
            values[place] = (block * factor).to(torch.float8_e4m3fn)
            scales[i, j] = torch.tensor(1.0) / factor if amax.isfinite() else torch.nan
    return values, scales


def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    found = torch.zeros(values.shape, dtype=dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            found[place] = (values[place].to(torch.float32) * scales[i, j]).to(dtype)
    return found
