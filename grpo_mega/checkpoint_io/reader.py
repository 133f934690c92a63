"""Read the tensors of a checkpoint of either kind: block by block for conversions, or boxes for a rank to load.

Unchanged rows are read directly into their place. Columns, casts and block scales go through torch, a few rows at a
time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from grpo_mega.checkpoint_io.dcp_read import is_distributed_checkpoint
from grpo_mega.checkpoint_io.hf_files import Stored, weight_files
from grpo_mega.checkpoint_io.hf_weights import HfWeights
from grpo_mega.checkpoint_io.megatron_weights import MegatronWeights
from grpo_mega.checkpoint_io.slices import (
    BLOCK_BYTES,
    ITEM_BYTES,
    TORCH_NAMES,
    Files,
    SliceCopy,
    Target,
    Weights,
    target_of,
)
from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Box, Index, alone, region
from grpo_mega.weights.spec import Family, ModelShape


def torch_dtype(dtype: str) -> torch.dtype:
    return getattr(torch, TORCH_NAMES[dtype])


class Streamer:
    """Reads targets for one thread, which shares `files` with others."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._block, self._scratch = bytearray(0), bytearray(0)

    def blocks(self, target: Target) -> Iterator[memoryview]:
        """Yield all bytes of the target in order, in blocks of rows. A block is valid until the next one is
        requested.
        """
        row_bytes = target.columns * ITEM_BYTES[target.dtype]
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        self._block = _at_least(self._block, min(step, target.rows) * row_bytes)
        for first in range(0, target.rows, step):
            count = min(step, target.rows - first)
            block = memoryview(self._block)[: count * row_bytes]
            self._fill(block, target, first, count)
            yield block

    def read(self, target: Target) -> Tensor:
        """Return the target as a matrix."""
        if not target.num_bytes:
            return torch.empty((target.rows, target.columns), dtype=torch_dtype(target.dtype))
        values = bytearray(target.num_bytes)
        self._fill(memoryview(values), target, 0, target.rows)
        return _matrix(values, target.dtype, target.columns)

    def _fill(self, block: memoryview, target: Target, first: int, count: int) -> None:
        """Fill the block with `count` rows of the target."""
        row_bytes = len(block) // count
        for copy in target.copies:
            start, end = max(copy.to_row, first), min(copy.to_row + copy.rows, first + count)
            if start >= end:
                continue
            rows, row = block[(start - first) * row_bytes : (end - first) * row_bytes], copy.row + start - copy.to_row
            if copy.is_unchanged_rows_of(target):
                self._files.read_into(copy.extent.path, copy.extent.offset + row * row_bytes, rows)
            else:
                place = _matrix(rows, target.dtype, target.columns)
                self._fill_columns(place[:, copy.to_column : copy.to_column + copy.columns], copy, row)

    @torch.no_grad()
    def _fill_columns(self, place: Tensor, copy: SliceCopy, row: int) -> None:
        """Fill `place` with the copy's columns of the extent's rows, starting at `row`, times the scales of their
        blocks.
        """
        extent = copy.extent
        step = max(1, BLOCK_BYTES // max(1, extent.row_bytes))
        for start in range(0, place.shape[0], step):
            count = min(step, place.shape[0] - start)
            self._scratch = _at_least(self._scratch, count * extent.row_bytes)
            rows = memoryview(self._scratch)[: count * extent.row_bytes]
            self._files.read_into(extent.path, extent.offset + (row + start) * extent.row_bytes, rows)
            values = _matrix(rows, extent.dtype, extent.columns)[:, copy.column : copy.column + copy.columns]
            if extent.scale is not None:
                scales, height, width = extent.scale.extent, extent.scale.rows, extent.scale.columns
                first, last = (row + start) // height, (row + start + count - 1) // height
                raw = bytearray((last - first + 1) * scales.row_bytes)
                self._files.read_into(scales.path, scales.offset + first * scales.row_bytes, memoryview(raw))
                blocks = _matrix(raw, scales.dtype, scales.columns).float()
                block_rows = torch.arange(row + start, row + start + count) // height - first
                block_columns = torch.arange(copy.column, copy.column + copy.columns) // width
                values = values.float() * blocks[block_rows][:, block_columns]
            place[start : start + count].copy_(values)


def _matrix(data: bytearray | memoryview, dtype: str, columns: int) -> Tensor:
    """Return a view of the data as a matrix."""
    return torch.frombuffer(data, dtype=torch_dtype(dtype)).view(-1, columns)


def _at_least(buffer: bytearray, length: int) -> bytearray:
    return buffer if len(buffer) >= length else bytearray(length)


def is_finite(values: Tensor) -> bool:
    """Return True if no element is NaN or infinite.

    A NaN or infinity makes the sum non-finite. So do large elements, and then the minimum and maximum decide.
    """
    return math.isfinite(values.sum()) or all(math.isfinite(value) for value in torch.aminmax(values))


class CheckpointReader:
    """Reads boxes of a checkpoint's tensors, in memory of about the box. A context manager."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._files = Files()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()
        self._weights.close()

    @property
    def names(self) -> set[str]:
        return set(self._weights.shapes)

    def shape(self, name: str) -> Index:
        return self._weights.shapes[name]

    def num_bytes(self, name: str) -> int:
        return prod(self.shape(name)) * ITEM_BYTES[self._weights.dtype(name)]

    def check(self, expected: Mapping[str, Index]) -> None:
        """Raise WeightMappingError for the first tensor that is missing, unknown, or has a wrong shape."""
        self._weights.check(expected)

    def read(self, box: Box) -> Tensor:
        """Return the box's elements in the checkpoint's dtype. Raise WeightMappingError if one is NaN or infinite."""
        target = target_of(alone(box), self._weights)
        values = Streamer(self._files).read(target).reshape(box.shape)
        if values.numel() and not is_finite(values):
            source = target.copies[0].extent.path if len(target.copies) == 1 else self._weights.folder
            raise WeightMappingError(
                f"{source}: {box.tensor} holds NaN or infinity; fetch it again, or take another checkpoint"
            )
        return values


def open_reader(folder: Path, family: Family, shape: ModelShape) -> CheckpointReader:
    """Return the reader of a model folder with safetensors or Megatron files. Raise WeightMappingError."""
    if is_distributed_checkpoint(folder):
        return CheckpointReader(MegatronWeights(folder, family, shape))
    return open_hf_reader(folder)


def open_hf_reader(folder: Path) -> CheckpointReader:
    """Return the reader of a Hugging Face folder's safetensors. Raise WeightMappingError."""
    weight_files(folder)  # raises for other formats
    return CheckpointReader(HfWeights(folder, {}))


def joined(tensors: Mapping[str, Tensor], stored: Stored) -> dict[str, Tensor]:
    """Return the `stored` tensors of a folder (see folder_tensors), made of `tensors`."""
    return {
        name: tensors[names[0]] if names == [name] else torch.cat([tensors[part] for part in names]).view(shape)
        for name, (shape, names) in stored.items()
    }


def random_reader(tensors: Mapping[str, Index], seed: int, std: float) -> Callable[[Box], Tensor]:
    """Return a function that reads boxes of random tensors, identical in every parallel layout.

    Norms multiply by 1, biases are 0. Everything else is normal with standard deviation `std`, and each tensor has a
    separate random stream. For small models only, because every read draws the whole tensor.
    """
    has_linear_attention = any(".linear_attn." in name for name in tensors)

    def read(box: Box) -> Tensor:
        if box.tensor.endswith("norm.weight"):
            # In models with linear attention all other norms have zero-centred weights.
            is_zero_centred = has_linear_attention and ".linear_attn." not in box.tensor
            return torch.zeros(box.shape) if is_zero_centred else torch.ones(box.shape)
        if box.tensor.endswith("bias"):
            return torch.zeros(box.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{box.tensor}".encode()))
        return torch.normal(0.0, std, tensors[box.tensor], generator=generator)[region(box.start, box.shape)]

    return read
