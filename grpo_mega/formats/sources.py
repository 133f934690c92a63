"""Where the elements of Hugging Face tensors lie in files, whatever the files' format; needs no torch.

An `Extent` is a matrix that lies row by row in a file. A checkpoint of either kind is `Weights`: for each Hugging Face tensor,
the parts of which it consists, each a box of it at a place of an extent. Vectors are matrices of one column.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dtypes import ITEM_BYTES
from grpo_mega.weights.boxes import Box, Index


@dataclass(frozen=True)
class Scale:
    """Of a block-quantised matrix: element [i, j] is multiplied by the scale at [i // rows, j // columns]."""

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


class Part(NamedTuple):
    """`box` of a Hugging Face tensor begins at [row, column] of `extent`."""

    box: Box
    extent: Extent
    row: int
    column: int


class Weights(Protocol):
    """The tensors of a checkpoint under their Hugging Face names."""

    @property
    def folder(self) -> Path: ...

    @property
    def files(self) -> list[Path]:
        """All that weights are read from."""
        ...

    def shapes(self) -> dict[str, Index]: ...

    def dtype(self, name: str) -> str:
        """In which the tensor is converted: its own, or for a quantised one that of the model."""
        ...

    def parts(self, name: str) -> list[Part]: ...


class Files:
    """Open files that threads share. Close it when no one reads any more."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fills the buffer. Raises WeightMappingError if the file ends before."""
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

    def close(self) -> None:
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()

    def _descriptor(self, path: Path) -> int:
        found = self._descriptors.get(path)
        if found is None:
            with self._lock:
                if path not in self._descriptors:
                    try:
                        self._descriptors[path] = os.open(path, os.O_RDONLY)
                    except OSError as error:
                        reason = f"cannot be opened ({error.strerror})"
                        raise WeightMappingError(f"{path} {reason}; fetch the file again") from None
                found = self._descriptors[path]
        return found


def matrix(shape: Index) -> tuple[int, int]:
    """Rows and columns of a tensor: the last dim are the columns of all but vectors."""
    return (prod(shape), 1) if len(shape) < 2 else (prod(shape[:-1]), shape[-1])


def whole(name: str, shape: Index) -> Box:
    return Box(name, (0,) * len(shape), tuple(shape))
