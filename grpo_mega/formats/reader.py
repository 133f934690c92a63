"""Boxes of Hugging Face tensors for a rank to load: from a checkpoint of either kind, or random numbers from a seed."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dcp_read import is_distributed_checkpoint
from grpo_mega.formats.dtypes import ITEM_BYTES
from grpo_mega.formats.hf_files import weight_files
from grpo_mega.formats.hf_weights import HfWeights
from grpo_mega.formats.megatron_weights import MegatronWeights
from grpo_mega.formats.slices import Copy, box_target
from grpo_mega.formats.stream import is_finite, torch_dtype
from grpo_mega.weights.boxes import Box, Index, region
from grpo_mega.weights.spec import Family, ModelShape


class CheckpointReader:
    """Reads slices of a checkpoint's tensors, and only the bytes of the requested boxes. A context manager."""

    def __init__(self, weights: HfWeights | MegatronWeights) -> None:
        self._weights = weights
        self._maps: dict[Path, mmap.mmap] = {}

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._maps.clear()
        if isinstance(self._weights, MegatronWeights):
            self._weights.close()

    @property
    def names(self) -> set[str]:
        return set(self._weights.shapes)

    def shape(self, name: str) -> Index:
        return self._weights.shapes[name]

    def num_bytes(self, name: str) -> int:
        return prod(self.shape(name)) * ITEM_BYTES[self._weights.dtype(name)]

    def read(self, box: Box) -> Tensor:
        """Return the box's elements in the checkpoint's dtype. Raise WeightMappingError if one is NaN or infinite."""
        target = box_target(box, self._weights)
        if len(target.copies) == 1:
            values = self._view(target.copies[0])
        else:
            values = torch.empty((target.rows, target.columns), dtype=torch_dtype(target.dtype))
            for copy in target.copies:
                place = values[copy.to_row : copy.to_row + copy.rows, copy.to_column : copy.to_column + copy.columns]
                place.copy_(self._view(copy))
        values = values.reshape(box.shape)
        if values.numel() and not is_finite(values):
            source = target.copies[0].extent.path if len(target.copies) == 1 else self._weights.folder
            raise WeightMappingError(
                f"{source}: {box.tensor} holds NaN or infinity; fetch it again, or take another checkpoint"
            )
        return values

    def check(self, expected: Mapping[str, Index]) -> None:
        """Raise WeightMappingError for the first tensor that is missing, unknown, or has a wrong shape."""
        if isinstance(self._weights, HfWeights):  # a Megatron checkpoint was compared with the family when it was opened
            self._weights.check(expected)

    def _view(self, copy: Copy) -> Tensor:
        """Return the elements of a copy as a view of its memory-mapped file, [rows, columns]."""
        extent = copy.extent
        assert extent.scale is None, "check() refuses quantised checkpoints"
        if extent.path not in self._maps:
            with extent.path.open("rb") as file:
                # Torch refuses read-only memory. Nothing writes, so no page is ever copied.
                self._maps[extent.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype, count = torch_dtype(extent.dtype), extent.rows * extent.columns
        values = torch.frombuffer(self._maps[extent.path], dtype=dtype, count=count, offset=extent.offset)
        matrix = values.view(extent.rows, extent.columns)
        return matrix[copy.row : copy.row + copy.rows, copy.column : copy.column + copy.columns]


def open_reader(folder: Path, family: Family, shape: ModelShape) -> CheckpointReader:
    """Return the reader of a model folder with safetensors or Megatron files. Raise WeightMappingError."""
    if is_distributed_checkpoint(folder):
        return CheckpointReader(MegatronWeights(folder, family, shape))
    return open_hf_reader(folder)


def open_hf_reader(folder: Path) -> CheckpointReader:
    """Return the reader of a Hugging Face folder's safetensors. Raise WeightMappingError."""
    weight_files(folder)  # raises for other formats
    return CheckpointReader(HfWeights(folder, {}))


def random_reader(tensors: Mapping[str, Index], seed: int, std: float) -> Callable[[Box], Tensor]:
    """Return a function that reads boxes of random tensors, identical in every parallel layout.

    Norms are 1, biases 0. Everything else is normal with standard deviation `std`, and each tensor has a separate random
    stream. For small models only, because every read draws the whole tensor.
    """

    def read(box: Box) -> Tensor:
        if box.tensor.endswith("norm.weight"):
            return torch.ones(box.shape)
        if box.tensor.endswith("bias"):
            return torch.zeros(box.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{box.tensor}".encode()))
        return torch.normal(0.0, std, tensors[box.tensor], generator=generator)[region(box.start, box.shape)]

    return read
