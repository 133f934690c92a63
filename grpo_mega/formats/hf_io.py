"""Hugging Face checkpoint folders: reading slices, and writing shards that `from_pretrained` loads.

Reading touches only the bytes of the boxes asked for. Writing copies config.json and the tokenizer's files byte for byte from
the folder the model came from (libraries rewrite fields when they save a config), and puts every file under its final name
only when it is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.hf_files import INDEX, SINGLE, check_shapes, side_files, weight_files
from grpo_mega.weights.boxes import Box, Index


class CheckpointReader:
    """Slices of a folder's safetensors, sharded or not. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._handles = {path: self._open(path) for path in weight_files(self.folder)}
        self._file_of = {tensor: path for path, handle in self._handles.items() for tensor in handle.keys()}  # noqa: SIM118

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> Index:
        return tuple(self._slice(name).get_shape())

    def read(self, box: Box) -> Tensor:
        """The box's elements in the file's dtype. Raises WeightMappingError if one of them is NaN or infinite."""
        values = self._slice(box.tensor)[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        if values.is_floating_point() and values.numel() and not _is_finite(values):
            raise WeightMappingError(
                f"{self._file_of[box.tensor]}: {box.tensor} holds NaN or infinity; "
                "fetch the file again, or take another checkpoint"
            )
        return values

    def check(self, expected: Mapping[str, Index]) -> None:
        """Raises WeightMappingError for the first tensor that is missing, has a wrong shape, or is not known."""
        check_shapes(self.folder, {name: self.shape(name) for name in self.names}, expected)

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise WeightMappingError(f"{path} cannot be read ({error}); fetch the file again") from None

    def _slice(self, name: str) -> Any:
        return self._handles[self._file_of[name]].get_slice(name)


def _is_finite(values: Tensor) -> bool:
    """One pass without a copy: the extremes of a tensor with a NaN are NaN."""
    low, high = torch.aminmax(values)
    return math.isfinite(float(low)) and math.isfinite(float(high))


def shards(tensors: Mapping[str, Index], itemsize: int, max_shard_bytes: int = 5 << 30) -> list[list[str]]:
    """Splits the tensors, in order, into files of at most `max_shard_bytes` (a larger tensor gets its own)."""
    found: list[list[str]] = [[]]
    used = 0
    for name, shape in tensors.items():
        nbytes = itemsize
        for n in shape:
            nbytes *= n
        if found[-1] and used + nbytes > max_shard_bytes:
            found.append([])
            used = 0
        found[-1].append(name)
        used += nbytes
    return found


class CheckpointWriter:
    """Writes a checkpoint shard by shard into `folder`, which appears under its name only when `finish` has been called."""

    def __init__(self, folder: Path, source: Path, num_shards: int) -> None:
        self.folder, self.num_shards = Path(folder), num_shards
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        if self.partial.exists():
            shutil.rmtree(self.partial)
        self.partial.mkdir(parents=True)
        self._weight_map: dict[str, str] = {}
        self._total = 0
        for path in side_files(Path(source)):
            shutil.copyfile(path, self.partial / path.name)

    def write(self, shard: int, tensors: Mapping[str, Tensor]) -> None:
        name = SINGLE if self.num_shards == 1 else f"model-{shard + 1:05d}-of-{self.num_shards:05d}.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, self.partial / name, metadata={"format": "pt"})
        self._weight_map |= dict.fromkeys(tensors, name)
        self._total += sum(t.nbytes for t in tensors.values())

    def finish(self) -> None:
        if self.num_shards > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.rename(self.partial, self.folder)
