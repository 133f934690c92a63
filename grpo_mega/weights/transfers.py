"""Transfers: which slices go from which rank to which, so that every target holds what its layout wants.

Each element a target holds is fetched exactly once: from its own rank where that holds it, else from a rank of its node, else
from any; among equals from the one that has sent least so far. So the bytes moved equal the lower bound (what the targets
hold, less what they have already), and the result is the same on every rank that computes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Box, Holding, Index, Piece
from grpo_mega.weights.spec import num_blocks

SCALE_BYTES = 4


class Transfer(NamedTuple):
    """Copy `source[source_offset : + shape]` of one rank to `target[target_offset : + shape]` of another (or the same).

    One that is quantised travels as FP8 values and the scales of its blocks, which it holds whole.
    """

    source_rank: int
    target_rank: int
    source: str
    target: str
    source_offset: Index
    target_offset: Index
    box: Box
    is_quantised: bool = False

    @property
    def size(self) -> int:
        return self.box.size

    def num_bytes(self, itemsize: int) -> int:
        """As it travels, where an element that is not quantised takes `itemsize` bytes."""
        if not self.is_quantised:
            return self.box.size * itemsize
        return self.box.size + SCALE_BYTES * math.prod(num_blocks(self.box.shape))


class Need(NamedTuple):
    """A box that a rank wants for `target`, and who can give it: the rank itself, else ranks of its node, else all that can."""

    rank: int
    target: Piece
    part: Box
    givers: list[tuple[int, Piece]]  # the same list for needs that have the same givers


def match(sources: Sequence[Holding], targets: Sequence[Holding], ranks_per_node: int) -> list[Need]:
    """What `targets[rank]` want of what `sources[rank]` hold, ordered by Hugging Face tensor.

    Raises WeightMappingError if a target wants what no source holds.
    """
    wanted: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, piece in _pieces(targets):
        wanted[piece.box.tensor].append((rank, piece))
    holders: dict[str, dict[Box, dict[int, Piece]]] = {tensor: defaultdict(dict) for tensor in wanted}
    for rank, piece in _pieces(sources):
        if piece.box.tensor in wanted:
            holders[piece.box.tensor][piece.box][rank] = piece
    return [
        need
        for tensor, pieces in wanted.items()
        for need in _needs_of(pieces, [_Held(box, by_rank, ranks_per_node) for box, by_rank in holders[tensor].items()])
    ]


def choose(needs: Iterable[Need], sent: list[int], weight: int = 1) -> list[Transfer]:
    """A giver for each need. `sent`, elements by rank, is brought up to date as if every transfer were made `weight` times."""
    transfers = []
    for need in needs:
        rank, piece = need.givers[0] if len(need.givers) == 1 else min(need.givers, key=lambda g: (sent[g[0]], g[0]))
        if rank != need.rank:
            sent[rank] += need.part.size * weight
        transfers.append(
            Transfer(rank, need.rank, piece.local, need.target.local, piece.at(need.part), need.target.at(need.part), need.part)
        )
    return transfers


class _Held:
    """A box and its holders."""

    def __init__(self, box: Box, by_rank: dict[int, Piece], ranks_per_node: int) -> None:
        self.box, self._by_rank, self._ranks_per_node = box, by_rank, ranks_per_node
        self._all = sorted(by_rank.items())
        self._of_node: dict[int, list[tuple[int, Piece]]] = defaultdict(list)
        for rank, piece in self._all:
            self._of_node[rank // ranks_per_node].append((rank, piece))

    def distance(self, rank: int) -> int:
        return 0 if rank in self._by_rank else 1 if rank // self._ranks_per_node in self._of_node else 2

    def givers(self, rank: int) -> list[tuple[int, Piece]]:
        """The nearest."""
        if rank in self._by_rank:
            return [(rank, self._by_rank[rank])]
        return self._of_node.get(rank // self._ranks_per_node, self._all)


def _pieces(holdings: Sequence[Holding]) -> Iterable[tuple[int, Piece]]:
    return ((rank, piece) for rank, holding in enumerate(holdings) for tensor in holding.values() for piece in tensor.pieces)


def _needs_of(wanted: list[tuple[int, Piece]], held: list[_Held]) -> Iterable[Need]:
    """For the pieces of one Hugging Face tensor. Ranks that want the same box of the same holders share the arithmetic."""
    overlapping: dict[Box, list[_Held]] = {}
    parts: dict[tuple[Box, tuple[int, ...]], list[tuple[Box, _Held]]] = {}
    for rank, target in wanted:
        box = target.box
        if box not in overlapping:
            overlapping[box] = [h for h in held if h.box.intersect(box)]
        near = sorted(overlapping[box], key=lambda h: h.distance(rank))
        key = (box, tuple(map(id, near)))
        if key not in parts:
            parts[key] = _cover(rank, target, near)
        for part, source in parts[key]:
            yield Need(rank, target, part, source.givers(rank))


def _cover(rank: int, target: Piece, near: list[_Held]) -> list[tuple[Box, _Held]]:
    """Disjoint parts that make up the target's box, each from the first of `near` that has it."""
    parts: list[tuple[Box, _Held]] = []
    missing = [target.box]
    for source in near:
        still_missing: list[Box] = []
        for need in missing:
            part = need.intersect(source.box)
            if part is None:
                still_missing.append(need)
            else:
                parts.append((part, source))
                still_missing.extend(need.subtract(part))
        missing = still_missing
    if missing:
        raise WeightMappingError(f"no rank holds {missing[0]} which {target.local} of rank {rank} needs")
    return parts
