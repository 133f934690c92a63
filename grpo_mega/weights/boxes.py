"""Boxes: rectangular slices of Hugging Face tensors, and their position in a rank's local tensors.

The Hugging Face tensor is the common coordinate system. In any layout the shards of a rank are pieces: one box of a
Hugging Face tensor at one offset of a local tensor. Shapes and offsets count elements. A local tensor named "name[3]"
is the fourth sub-tensor of the parameter `name`. A `Block` describes tensors that repeat in many layers or experts only
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import sub
from typing import Literal

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """`tensor[start[0]:stop[0], start[1]:stop[1], ...]` of the Hugging Face tensor of that name."""

    tensor: str
    start: Index
    stop: Index

    @property
    def shape(self) -> Index:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return math.prod(map(sub, self.stop, self.start))

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection, or None if it is empty. Both boxes must be of the same tensor."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(self.tensor, start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def subtract(self, inner: Box) -> Iterator[Box]:
        """Yield disjoint boxes that together cover this box except `inner`, which must be inside it."""
        start, stop = list(self.start), list(self.stop)
        for dim, (a, b) in enumerate(zip(inner.start, inner.stop, strict=True)):
            if start[dim] < a:
                yield Box(self.tensor, tuple(start), (*stop[:dim], a, *stop[dim + 1 :]))
            if b < stop[dim]:
                yield Box(self.tensor, (*start[:dim], b, *start[dim + 1 :]), tuple(stop))
            start[dim], stop[dim] = a, b

    def numbered(self, layer: int, expert: int) -> Box:
        """Return the box with the numbers of a layer and an expert in place of {i} and {e}."""
        return Box(self.tensor.format(i=layer, e=expert), self.start, self.stop)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box at `offset` of the local tensor `local`, in the same orientation."""

    box: Box
    local: str
    offset: Index

    def at(self, part: Box) -> Index:
        """Return the offset in the local tensor of `part`, a box inside this piece's box."""
        return tuple(o + p - s for o, p, s in zip(self.offset, part.start, self.box.start, strict=True))


@dataclass(frozen=True)
class LocalTensor:
    """One tensor of a rank. Elements outside all pieces are padding, which is zero and never leaves the rank."""

    shape: Index
    pieces: tuple[Piece, ...]

    def above(self, other: LocalTensor) -> LocalTensor:
        """Return the tensor with the rows of `other` appended below the rows of this one."""
        rows = self.shape[0]
        below = (Piece(p.box, p.local, (rows + p.offset[0], *p.offset[1:])) for p in other.pieces)
        return LocalTensor((rows + other.shape[0], *self.shape[1:]), (*self.pieces, *below))

    def numbered(self, layer: int, expert: int, first_layer: int = 0, first_expert: int = 0) -> LocalTensor:
        """Return the tensor with numbers in place of {i} and {e}. In local names they count from the first layer and
        expert.
        """
        local = {"i": layer - first_layer, "e": expert - first_expert}
        pieces = (Piece(p.box.numbered(layer, expert), p.local.format(**local), p.offset) for p in self.pieces)
        return LocalTensor(self.shape, tuple(pieces))


def whole(tensor: str, shape: Index) -> Box:
    """Return the box that covers a whole Hugging Face tensor of this shape."""
    return Box(tensor, (0,) * len(shape), tuple(shape))


def alone(box: Box, local: str = "") -> LocalTensor:
    """Return the local tensor that consists of one box."""
    return LocalTensor(box.shape, (Piece(box, local, (0,) * len(box.shape)),))


RankShards = dict[str, LocalTensor]  # all tensors of one rank, keyed by local name

Kind = Literal["model", "layer", "expert"]  # a tensor occurs once in the model, in every layer, or for every expert
ONCE = range(1)


@dataclass(frozen=True)
class Block:
    """Tensors that repeat on a rank in some layers and experts. Names have {i} and {e} instead of numbers.

    Numbers in box names are the model's. Numbers in local names count from `first_layer` and the first expert.
    """

    kind: Kind
    layers: range
    experts: range
    tensors: RankShards
    first_layer: int = 0


def expand(blocks: Iterable[Block]) -> RankShards:
    """Return the tensors of all blocks, one by one."""
    return {
        local.format(i=layer - block.first_layer, e=expert - block.experts.start): tensor.numbered(
            layer, expert, block.first_layer, block.experts.start
        )
        for block in blocks
        for layer in block.layers
        for expert in block.experts
        for local, tensor in block.tensors.items()
    }


def region(offset: Index, shape: Index) -> tuple[slice, ...]:
    """Return the index of the sub-tensor of this shape at this offset."""
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
