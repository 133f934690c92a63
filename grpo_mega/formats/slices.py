"""What a tensor to be written is copied from: rectangles of extents, for either direction of a conversion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dtypes import ITEM_BYTES
from grpo_mega.formats.sources import Extent, Weights, matrix
from grpo_mega.weights.boxes import Box, Index, Piece

_ORDER = ("F64", "F32", "BF16", "F16")


class Copy(NamedTuple):
    """`extent[row : + rows, column : + columns]` goes to `[to_row, to_column]` of the target."""

    extent: Extent
    row: int
    column: int
    to_row: int
    to_column: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Target:
    """A tensor to be written, as a matrix. The copies cover each of its elements once, sorted by row and column."""

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
        """Whether it is bytes as they lie in files, one run after the other."""
        return all(
            c.columns == self.columns == c.extent.columns and c.extent.dtype == self.dtype and c.extent.scale is None
            for c in self.copies
        )


def target_of(name: str, shape: Index, pieces: Iterable[Piece], weights: Weights, dtype: str | None) -> Target:
    """The tensor of that shape that consists of `pieces`, boxes of Hugging Face tensors. `dtype` None: the tensors' own, of
    several the widest. Raises WeightMappingError if the checkpoint does not hold all of it."""
    rows, columns = matrix(shape)
    copies: list[Copy] = []
    dtypes: set[str] = set()
    for piece in pieces:
        dtypes.add(weights.dtype(piece.box.tensor))
        for part in weights.parts(piece.box.tensor):
            common = piece.box.intersect(part.box)
            if common is not None:
                copies.append(_copy(piece, common, part.box, part.extent, part.row, part.column))
    if sum(c.rows * c.columns for c in copies) != rows * columns:
        raise WeightMappingError(f"{weights.folder} does not hold all of {name}; fetch or save the checkpoint again")
    copies.sort(key=lambda c: (c.to_row, c.to_column))
    return Target(name, dtype or widest(dtypes), rows, columns, tuple(copies))


def widest(dtypes: set[str]) -> str:
    """One that holds the values of all."""
    if dtypes == {"BF16", "F16"}:
        return "F32"
    return min(dtypes, key=lambda d: _ORDER.index(d) if d in _ORDER else len(_ORDER))


def _copy(piece: Piece, common: Box, held: Box, extent: Extent, row: int, column: int) -> Copy:
    to_row, to_column = _pair(piece.at(common))
    from_row, from_column = _pair(tuple(a - b for a, b in zip(common.start, held.start, strict=True)))
    rows, columns = matrix(common.shape)
    return Copy(extent, row + from_row, column + from_column, to_row, to_column, rows, columns)


def _pair(index: Index) -> tuple[int, int]:
    return (index[0], 0) if len(index) == 1 else (index[0], index[1])
