"""Boxes: rectangular slices of Hugging Face tensors, and where they sit in a rank's local tensors.

The Hugging Face tensor is the common coordinate system: what a rank holds, whatever its layout, is said as pieces, each one
box of one Hugging Face tensor at one offset of one local tensor. Shapes and offsets count elements. A local tensor named
"name[3]" is the fourth sub-tensor of the parameter `name`. A `Block` says once what holds for many layers or experts.
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
        """The common part, or None if it is empty. Both boxes are of the same tensor."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(self.tensor, start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def subtract(self, inner: Box) -> Iterator[Box]:
        """Disjoint boxes that together are this one less `inner`, which lies inside it."""
        start, stop = list(self.start), list(self.stop)
        for dim, (a, b) in enumerate(zip(inner.start, inner.stop, strict=True)):
            if start[dim] < a:
                yield Box(self.tensor, tuple(start), (*stop[:dim], a, *stop[dim + 1 :]))
            if b < stop[dim]:
                yield Box(self.tensor, (*start[:dim], b, *start[dim + 1 :]), tuple(stop))
            start[dim], stop[dim] = a, b


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that sits at `offset` of the local tensor `local`, in the same orientation."""

    box: Box
    local: str
    offset: Index

    def at(self, part: Box) -> Index:
        """The offset in the local tensor of `part`, a box inside this piece's."""
        return tuple(o + p - s for o, p, s in zip(self.offset, part.start, self.box.start, strict=True))


@dataclass(frozen=True)
class LocalTensor:
    """One tensor of a rank. Elements outside all pieces are padding, which is zero and never leaves the rank."""

    shape: Index
    pieces: tuple[Piece, ...]


Holding = dict[str, LocalTensor]  # what one rank holds, by local name

Kind = Literal["model", "layer", "expert"]  # how often a tensor stands in a model: once, in every layer, for every expert
ONCE = range(1)


@dataclass(frozen=True)
class Block:
    """Tensors that a rank holds alike for each of some layers and experts, whose numbers names leave open as {i} and {e}.

    The numbers in the names of boxes are the model's; those in local names count from the block's first layer and expert.
    """

    kind: Kind
    layers: range
    experts: range
    tensors: Holding


def expand(blocks: Iterable[Block]) -> Holding:
    """The blocks' tensors, one by one."""
    return {
        local.format(i=layer - block.layers.start, e=expert - block.experts.start): _named(tensor, block, layer, expert)
        for block in blocks
        for layer in block.layers
        for expert in block.experts
        for local, tensor in block.tensors.items()
    }


def _named(tensor: LocalTensor, block: Block, layer: int, expert: int) -> LocalTensor:
    place = {"i": layer - block.layers.start, "e": expert - block.experts.start}
    pieces = tuple(
        Piece(Box(p.box.tensor.format(i=layer, e=expert), p.box.start, p.box.stop), p.local.format(**place), p.offset)
        for p in tensor.pieces
    )
    return LocalTensor(tensor.shape, pieces)


def region(offset: Index, shape: Index) -> tuple[slice, ...]:
    """The index of the sub-tensor of that shape at that offset."""
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
