"""Slices: where the elements of tensors are in files, and how a tensor to write is copied from them; needs no torch.

An `Extent` is a matrix stored row by row in a file; a vector is a matrix with one column. A checkpoint of either kind is
`Weights`: it maps each Hugging Face tensor to its parts, and each part is a box of the tensor at a place in an extent. A
`Target` is a tensor to write, as a list of copies, for either direction of a conversion.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dtypes import ITEM_BYTES, WEIGHTS
from grpo_mega.weights.boxes import Box, Index, LocalTensor, Piece, alone

BLOCK_BYTES = 512 << 10  # size of one read; two blocks stay in the cache of a core
_WRITE_BYTES = 128 << 10  # Linux 6.18 gives a larger write contiguous memory, which costs up to 5 times the CPU time


@dataclass(frozen=True)
class Scale:
    """The scales of a block-quantised matrix: element [i, j] is multiplied by the scale at [i // rows, j // columns]."""

    extent: Extent
    rows: int
    columns: int


@dataclass(frozen=True)
class Extent:
    path: Path
    offset: int
    dtype: str
    rows: int
    columns: int
    scale: Scale | None = None

    @property
    def row_bytes(self) -> int:
        return self.columns * ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


class Part(NamedTuple):
    """`box` of a Hugging Face tensor starts at [row, column] of `extent`."""

    box: Box
    extent: Extent
    row: int
    column: int


class Weights(Protocol):
    """The tensors of a checkpoint under their Hugging Face names."""

    folder: Path
    files: list[Path]  # all files that weights are read from
    shapes: dict[str, Index]

    def dtype(self, name: str) -> str:
        """Return the dtype of the tensor; for a quantised tensor, the dtype after dequantisation."""
        ...

    def parts(self, name: str) -> list[Part]: ...


class Copy(NamedTuple):
    """`extent[row : row + rows, column : column + columns]` goes to `[to_row, to_column]` of the target."""

    extent: Extent
    row: int
    column: int
    to_row: int
    to_column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Target:
    """A tensor to write, as a matrix. The copies cover each element once, sorted by row and column."""

    name: str
    dtype: str
    rows: int
    columns: int
    copies: tuple[Copy, ...]

    @property
    def num_bytes(self) -> int:
        return self.rows * self.columns * ITEM_BYTES[self.dtype]

    @property
    def is_runs(self) -> bool:
        """True if the tensor consists of consecutive unchanged runs of bytes."""
        return all(
            c.columns == self.columns == c.extent.columns and c.extent.dtype == self.dtype and c.extent.scale is None
            for c in self.copies
        )


class Files:
    """Open files that threads share."""

    def __init__(self, flags: int = os.O_RDONLY) -> None:
        self._flags = flags
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fill the buffer. Raise WeightMappingError if the file is too short."""
        descriptor = self._descriptor(path)
        done = 0
        while done < len(buffer):
            count = os.preadv(descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise WeightMappingError(f"{path} is cut short before byte {offset + len(buffer)}; fetch the file again")
            done += count

    def read(self, path: Path, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def write(self, path: Path, offset: int, data: bytes | bytearray | memoryview) -> None:
        descriptor, view = self._descriptor(path), memoryview(data)
        while view:
            count = os.pwrite(descriptor, view[:_WRITE_BYTES], offset)
            view, offset = view[count:], offset + count

    def sync(self) -> None:
        """Wait until everything written is on the disk."""
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Close all files. No thread may use them afterwards."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                try:
                    self._descriptors[path] = os.open(path, self._flags)
                except OSError as error:
                    raise WeightMappingError(f"{path} cannot be opened ({error.strerror}); fetch the file again") from None
            return self._descriptors[path]


def target_of(tensor: LocalTensor, weights: Weights, dtype: str | None = None) -> Target:
    """Return the target for a tensor made of boxes of Hugging Face tensors, named after these tensors.

    `dtype` None: the dtype of these tensors, the widest if there are several. Raise WeightMappingError if the checkpoint does
    not contain the whole tensor.
    """
    name = ", ".join(dict.fromkeys(piece.box.tensor for piece in tensor.pieces))
    rows, columns = matrix(tensor.shape)
    copies: list[Copy] = []
    dtypes: set[str] = set()
    for piece in tensor.pieces:
        dtypes.add(weights.dtype(piece.box.tensor))
        for part in weights.parts(piece.box.tensor):
            common = piece.box.intersect(part.box)
            if common is not None:
                copies.append(_copy(piece, common, part))
    if sum(c.rows * c.columns for c in copies) != rows * columns:
        raise WeightMappingError(f"{weights.folder} does not hold all of {name}; fetch or save the checkpoint again")
    copies.sort(key=lambda c: (c.to_row, c.to_column))
    return Target(name, dtype or _widest(dtypes), rows, columns, tuple(copies))


def box_target(box: Box, weights: Weights, dtype: str | None = None) -> Target:
    """Return a box of a Hugging Face tensor as a separate target."""
    return target_of(alone(box), weights, dtype)


def matrix(shape: Index) -> tuple[int, int]:
    """Return the rows and columns of a tensor. The last dim is the columns, except for vectors."""
    return (prod(shape), 1) if len(shape) < 2 else (prod(shape[:-1]), shape[-1])


def row_and_column(index: Index) -> tuple[int, int]:
    return (index[0], 0) if len(index) == 1 else (index[0], index[1])


def _widest(dtypes: set[str]) -> str:
    """Return the dtype that can hold the values of all dtypes."""
    return "F32" if dtypes == {"BF16", "F16"} else min(dtypes, key=WEIGHTS.index)


def _copy(piece: Piece, common: Box, part: Part) -> Copy:
    to_row, to_column = row_and_column(piece.at(common))
    row, column = row_and_column(tuple(a - b for a, b in zip(common.start, part.box.start, strict=True)))
    return Copy(part.extent, part.row + row, part.column + column, to_row, to_column, *matrix(common.shape))
