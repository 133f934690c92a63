"""Slices: where the elements of tensors are in files, and how a tensor to write is copied from them; needs no torch.

An `Extent` is a matrix stored row by row in a file; a vector is a matrix with one column. A checkpoint of either kind
is `Weights`: it maps each Hugging Face tensor to its parts, and each part is a box of the tensor at a place in an
extent. A `Target` is a tensor to write, as a list of copies, for either direction of a conversion. Element types have
their names in safetensors files.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import sub
from pathlib import Path
from typing import NamedTuple, Protocol

from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.weights.boxes import Box, Index, LocalTensor

BLOCK_BYTES = 512 << 10  # size of one read; two blocks stay in the cache of a core
_WRITE_BYTES = 128 << 10  # Linux 6.18 gives a larger write contiguous memory, which costs up to 5 times the CPU time

# Columns: safetensors name, bytes, torch name, storage class in torch.save files.
_TYPES = """
    F64     8 float64       DoubleStorage
    F32     4 float32       FloatStorage
    F16     2 float16       HalfStorage
    BF16    2 bfloat16      BFloat16Storage
    I64     8 int64         LongStorage
    I32     4 int32         IntStorage
    I16     2 int16         ShortStorage
    I8      1 int8          CharStorage
    U8      1 uint8         ByteStorage
    BOOL    1 bool          BoolStorage
    F8_E4M3 1 float8_e4m3fn -
    F8_E5M2 1 float8_e5m2   -
"""
_ROWS = [line.split() for line in _TYPES.strip().splitlines()]
WEIGHTS = ("F64", "F32", "F16", "BF16")  # dtypes of weights that can be converted and trained, widest first
FP8 = "F8_E4M3"  # dtype of block-quantised checkpoints
ITEM_BYTES = {name: int(size) for name, size, _, _ in _ROWS} | {"U64": 8, "U32": 4, "U16": 2, "F8_E8M0": 1}
TORCH_NAMES = {name: torch for name, _, torch, _ in _ROWS}
FROM_TORCH = {torch: name for name, torch in TORCH_NAMES.items()}
STORAGE_NAMES = {name: storage for name, _, _, storage in _ROWS if storage != "-"}
FROM_STORAGE = {storage: name for name, storage in STORAGE_NAMES.items()}


def known_dtype(dtype: str | None) -> str | None:
    """Return the safetensors name of torch's name of a dtype; None for None. Raise ConfigError for another one."""
    names = {TORCH_NAMES[name]: name for name in WEIGHTS}
    if dtype is not None and dtype not in names:
        raise ConfigError(f"--dtype={dtype} is not known; use one of {', '.join(sorted(names))}")
    return names[dtype] if dtype else None


def item_bytes(torch_name: str) -> int:
    """Return the bytes per element of the torch dtype with this name."""
    return ITEM_BYTES[FROM_TORCH[torch_name]]


@dataclass(frozen=True)
class Scale:
    """The scales of a block-quantised matrix: element [i, j] is multiplied by the scale at [i // rows, j //
    columns].
    """

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

    def check(self, expected: Mapping[str, Index]) -> None:
        """Raise WeightMappingError for the first tensor that is missing, unknown, or has a wrong shape."""
        ...

    def close(self) -> None: ...


def main_dtype(weights: Weights) -> str:
    """Return torch's name of the largest tensor's dtype."""
    sizes = ((prod(shape), weights.dtype(name)) for name, shape in weights.shapes.items())
    return TORCH_NAMES[max(sizes, default=(0, "F32"))[1]]


class SliceCopy(NamedTuple):
    """`extent[row : row + rows, column : column + columns]` goes to `[to_row, to_column]` of the target."""

    extent: Extent
    row: int
    column: int
    to_row: int
    to_column: int
    rows: int
    columns: int

    def is_unchanged_rows_of(self, target: Target) -> bool:
        """Return True if the copy is a run of bytes both in its file and in the target."""
        extent = self.extent
        has_same_elements = extent.dtype == target.dtype and extent.scale is None
        return has_same_elements and self.columns == target.columns == extent.columns


@dataclass(frozen=True)
class Target:
    """A tensor to write, as a matrix. The copies cover each element once, sorted by row and column."""

    name: str
    dtype: str
    rows: int
    columns: int
    copies: tuple[SliceCopy, ...]

    @property
    def num_bytes(self) -> int:
        return self.rows * self.columns * ITEM_BYTES[self.dtype]


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
                raise WeightMappingError(
                    f"{path} is cut short before byte {offset + len(buffer)}; fetch the file again"
                )
            done += count

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
                    raise WeightMappingError(
                        f"{path} cannot be opened ({error.strerror}); fetch the file again"
                    ) from None
            return self._descriptors[path]


def target_of(tensor: LocalTensor, weights: Weights, dtype: str | None = None) -> Target:
    """Return the target for a tensor made of boxes of Hugging Face tensors, named after these tensors.

    `dtype` None: the dtype of these tensors, the widest if there are several. Raise WeightMappingError if the
    checkpoint does not contain the whole tensor.
    """
    name = ", ".join(dict.fromkeys(piece.box.tensor for piece in tensor.pieces))
    rows, columns = matrix(tensor.shape)
    copies: list[SliceCopy] = []
    dtypes: set[str] = set()
    for piece in tensor.pieces:
        dtypes.add(weights.dtype(piece.box.tensor))
        for part in weights.parts(piece.box.tensor):
            common = piece.box.intersect(part.box)
            if common is not None:
                row, column = row_and_column(tuple(map(sub, common.start, part.box.start)))
                to = row_and_column(piece.at(common))
                copies.append(SliceCopy(part.extent, part.row + row, part.column + column, *to, *matrix(common.shape)))
    if sum(c.rows * c.columns for c in copies) != rows * columns:
        raise WeightMappingError(f"{weights.folder} does not hold all of {name}; fetch or save the checkpoint again")
    copies.sort(key=lambda c: (c.to_row, c.to_column))
    if dtype is None:  # the dtype that can hold the values of all
        dtype = "F32" if dtypes == {"BF16", "F16"} else min(dtypes, key=WEIGHTS.index)
    return Target(name, dtype, rows, columns, tuple(copies))


def matrix(shape: Index) -> tuple[int, int]:
    """Return the rows and columns of a tensor. The last dim is the columns, except for vectors."""
    return (prod(shape), 1) if len(shape) < 2 else (prod(shape[:-1]), shape[-1])


def row_and_column(index: Index) -> tuple[int, int]:
    row, column, *_ = (*index, 0)
    return row, column
