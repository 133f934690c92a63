"""Helpers for the parts of the extension: checks that raise like the C++ code, and the tiling of a matrix into blocks
of 128."""

from __future__ import annotations

from typing import Any

import torch

BLOCK = 128


def check(holds: bool, message: str) -> None:
    """Raise RuntimeError like NVTE_CHECK of the extension."""
    if not holds:
        raise RuntimeError(message)


def check_int32(cu_seqlens: torch.Tensor) -> None:
    """Refuse other integer types, because the kernels would read their bytes as int32."""
    check(cu_seqlens.dtype is torch.int32, f"cu_seqlens are read as int32, found {cu_seqlens.dtype}")


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def block_maxima(values: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the largest magnitude of each [height, width] block of a matrix. Blocks at the edges may be smaller."""
    rows, cols = values.shape
    down, across = -(-rows // height), -(-cols // width)
    padded = values.new_zeros(down * height, across * width)
    padded[:rows, :cols] = values
    return padded.abs().view(down, height, across, width).amax(dim=(1, 3))


def spread(scales: torch.Tensor, height: int, width: int, rows: int, cols: int) -> torch.Tensor:
    """Return [rows, cols]: for each element the scale of its block."""
    return scales.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :cols]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return [..., K] as [K, ...], contiguous."""
    return x.movedim(-1, 0).contiguous()


def is_plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not hasattr(x, "_quantizer")
