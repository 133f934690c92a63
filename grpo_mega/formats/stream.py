"""The bytes of a target, block by block, in memory that does not grow with the target.

Unchanged runs of bytes are read directly into the block. Columns, casts and block scales go through torch, a few rows at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mega.formats.dtypes import ITEM_BYTES, TORCH_NAMES
from grpo_mega.formats.slices import BLOCK_BYTES, Copy, Extent, Files, Target


def torch_dtype(dtype: str) -> torch.dtype:
    return getattr(torch, TORCH_NAMES[dtype])


class Streamer:
    """The buffers of one worker. A block is valid until the next one is requested."""

    def __init__(self, files: Files, block_bytes: int = BLOCK_BYTES) -> None:
        self._files, self._block_bytes = files, block_bytes
        self._block = bytearray(block_bytes)
        self._scratch = bytearray(0)

    def blocks(self, target: Target) -> Iterator[memoryview]:
        """Yield all bytes of the target in order."""
        return self._runs(target) if target.is_runs else self._rows(target)

    def _runs(self, target: Target) -> Iterator[memoryview]:
        view, filled = memoryview(self._block), 0
        for copy in target.copies:
            offset, left = copy.extent.offset + copy.row * copy.extent.row_bytes, copy.rows * copy.extent.row_bytes
            while left:
                length = min(left, self._block_bytes - filled)
                self._files.read_into(copy.extent.path, offset, view[filled : filled + length])
                offset, left, filled = offset + length, left - length, filled + length
                if filled == self._block_bytes:
                    yield view
                    filled = 0
        if filled:
            yield view[:filled]

    @torch.no_grad()
    def _rows(self, target: Target) -> Iterator[memoryview]:
        row_bytes = target.columns * ITEM_BYTES[target.dtype]
        step = max(1, self._block_bytes // max(1, row_bytes))
        if len(self._block) < step * row_bytes:
            self._block = bytearray(step * row_bytes)
        view = memoryview(self._block)
        for first in range(0, target.rows, step):
            count = min(step, target.rows - first)
            block = view[: count * row_bytes]
            matrix = torch.frombuffer(block, dtype=torch_dtype(target.dtype)).view(count, target.columns)
            for copy in target.copies:
                start, end = max(copy.to_row, first), min(copy.to_row + copy.rows, first + count)
                if start < end:
                    place = matrix[start - first : end - first, copy.to_column : copy.to_column + copy.columns]
                    self._fill(place, copy, copy.row + start - copy.to_row)
            yield block

    def _fill(self, place: Tensor, copy: Copy, row: int) -> None:
        """Fill `place` with the copy's columns of the extent's rows, starting at `row`."""
        extent = copy.extent
        step = max(1, self._block_bytes // max(1, extent.row_bytes))
        for start in range(0, place.shape[0], step):
            count = min(step, place.shape[0] - start)
            values = self._read(extent, row + start, count)[:, copy.column : copy.column + copy.columns]
            if extent.scale is not None:
                values = values.float() * self._scales(extent, row + start, count, copy)
            place[start : start + count].copy_(values)

    def _read(self, extent: Extent, row: int, count: int) -> Tensor:
        """Return rows of the extent, valid until the next read."""
        length = count * extent.row_bytes
        if len(self._scratch) < length:
            self._scratch = bytearray(length)
        view = memoryview(self._scratch)[:length]
        self._files.read_into(extent.path, extent.offset + row * extent.row_bytes, view)
        return torch.frombuffer(view, dtype=torch_dtype(extent.dtype)).view(count, extent.columns)

    def _scales(self, extent: Extent, row: int, count: int, copy: Copy) -> Tensor:
        """Return the scales of the copy's columns in these rows, [count, copy.columns] float32."""
        assert extent.scale is not None
        scales, height, width = extent.scale.extent, extent.scale.rows, extent.scale.columns
        first, last = row // height, (row + count - 1) // height
        length = (last - first + 1) * scales.row_bytes
        raw = bytearray(self._files.read(scales.path, scales.offset + first * scales.row_bytes, length))
        blocks = torch.frombuffer(raw, dtype=torch_dtype(scales.dtype)).view(-1, scales.columns).float()
        rows = torch.arange(row, row + count) // height - first
        columns = torch.arange(copy.column, copy.column + copy.columns) // width
        return blocks[rows][:, columns]


def is_finite(values: Tensor) -> bool:
    """Return True if no element is NaN or infinite.

    A NaN or infinity makes the sum non-finite. So do large elements, and then the minimum and maximum decide.
    """
    return math.isfinite(values.sum()) or all(math.isfinite(value) for value in torch.aminmax(values))
