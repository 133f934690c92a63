"""Transfers: which rank sends which slices to which rank, so that every target gets the shards of its layout.

Each element of a target is fetched exactly once: from its own rank if it is there, else from a rank of its node, else
from any rank. Among equal sources the one that has sent least so far is chosen. So the bytes moved equal the lower
bound (the elements of the targets, except elements that are already there), and every rank computes the same result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import ONCE, Box, Index, Piece, RankShards
from grpo_mega.weights.spec import BLOCK, FLOAT32, num_blocks

SCALE_BYTES = 4
Holders = list[tuple[int, Piece]]  # ranks with their pieces of one box
Place = tuple[int, int]  # numbers of a layer and an expert


class Transfer(NamedTuple):
    """A copy of `source[source_offset : + shape]` on one rank to `target[target_offset : + shape]` on another (or the
    same) rank.

    A quantised transfer has FP8 values and the scales of their blocks, and only whole blocks. The router's bias stays
    float32, because the rounded bias would choose other experts.
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
    def is_float32(self) -> bool:
        return self.box.tensor.endswith(FLOAT32)

    def num_bytes(self, itemsize: int) -> int:
        """Return the number of bytes sent, with `itemsize` bytes per element that is not quantised."""
        if not self.is_quantised:
            return self.box.size * (4 if self.is_float32 else itemsize)
        return self.box.size + SCALE_BYTES * math.prod(num_blocks(self.box.shape))


@dataclass(frozen=True)
class Template:
    """Transfers that repeat at several places. Names have {i} and {e} instead of the numbers of layer and expert.

    Places are counted layer by layer: number n is expert n % len(experts) of layer n // len(experts).
    """

    transfers: tuple[Transfer, ...]
    layers: range = ONCE
    experts: range = ONCE
    places: range = ONCE  # places of these transfers; templates with other source ranks have the other places
    source_first: Place = (0, 0)  # numbers in the sources' local names count from this place
    target_first: Place = (0, 0)

    @cached_property
    def num_places(self) -> int:
        return len(self.layers) * len(self.experts)

    def at(self, transfer: Transfer, place: int) -> Transfer:
        """Return one of the transfers with the numbers of a place in its names."""
        i, e = self.layers[place // len(self.experts)], self.experts[place % len(self.experts)]
        return transfer._replace(
            source=transfer.source.format(i=i - self.source_first[0], e=e - self.source_first[1]),
            target=transfer.target.format(i=i - self.target_first[0], e=e - self.target_first[1]),
            box=transfer.box.numbered(i, e),
        )


class Need(NamedTuple):
    """A box that a rank needs for `target`, and its nearest sources: the rank itself, else ranks of its node, else
    all.
    """

    rank: int
    target: Piece
    part: Box
    # The list is one object for all needs with the same sources.
    sources: Holders


def match(sources: Sequence[RankShards], targets: Sequence[RankShards], ranks_per_node: int) -> list[Need]:
    """Return the needs of `targets[rank]` with the `sources[rank]` that can serve them, in order of Hugging Face
    tensors.

    Raise WeightMappingError if a target needs an element that no source has.
    """
    wanted: dict[str, Holders] = defaultdict(list)
    for rank, piece in _pieces(targets):
        wanted[piece.box.tensor].append((rank, piece))
    holders: dict[str, dict[Box, dict[int, Piece]]] = {tensor: defaultdict(dict) for tensor in wanted}
    for rank, piece in _pieces(sources):
        if piece.box.tensor in wanted:
            holders[piece.box.tensor][piece.box][rank] = piece
    needs = []
    for tensor, pieces in wanted.items():
        held = [_Held(box, by_rank, ranks_per_node) for box, by_rank in holders[tensor].items()]
        overlapping: dict[Box, list[_Held]] = {}
        # Ranks with the same box and holders share the computation.
        parts: dict[tuple[Box, tuple[int, ...]], list[tuple[Box, _Held]]] = {}
        for rank, target in pieces:
            box = target.box
            if box not in overlapping:
                overlapping[box] = [h for h in held if h.box.intersect(box)]
            near = sorted(overlapping[box], key=lambda h: h.nearest(rank)[0])
            key = (box, tuple(map(id, near)))
            if key not in parts:
                parts[key] = _cover(rank, target, near)
            needs += [Need(rank, target, part, holder.nearest(rank)[1]) for part, holder in parts[key]]
    return needs


def choose_sources(needs: Iterable[Need], sent: list[int], weight: int, quantised: frozenset[str]) -> list[Transfer]:
    """Choose a source for each need. Update `sent`, elements per rank, as if every transfer ran `weight` times.

    Transfers of the Hugging Face tensors `quantised` are quantised. Raise WeightMappingError if one would cut an FP8
    block.
    """
    transfers = []
    for need in needs:
        is_quantised = need.part.tensor in quantised
        # The boxes of a tensor cover it. If all of them start at a block's start, they also end at a block's end.
        if is_quantised and any(start % BLOCK for start in need.part.start):
            raise WeightMappingError(
                f"a rank has {need.part.tensor} from {need.part.start}, inside a block of {BLOCK} that is quantised as"
                " a whole; use other tensor-parallel sizes, or do not quantise"
            )
        rank, piece = need.sources[0] if len(need.sources) == 1 else min(need.sources, key=lambda s: (sent[s[0]], s[0]))
        if rank != need.rank:
            sent[rank] += need.part.size * weight
        offsets = piece.at(need.part), need.target.at(need.part)
        transfers.append(Transfer(rank, need.rank, piece.local, need.target.local, *offsets, need.part, is_quantised))
    return transfers


class _Held:
    """A box and the ranks that hold it."""

    def __init__(self, box: Box, by_rank: dict[int, Piece], ranks_per_node: int) -> None:
        self.box, self._by_rank, self._ranks_per_node = box, by_rank, ranks_per_node
        self._all = sorted(by_rank.items())
        self._of_node: dict[int, Holders] = defaultdict(list)
        for rank, piece in self._all:
            self._of_node[rank // ranks_per_node].append((rank, piece))

    def nearest(self, rank: int) -> tuple[int, Holders]:
        """Return the distance to the nearest holders, and them: the rank itself (0), its node's (1), else all (2)."""
        if rank in self._by_rank:
            return 0, [(rank, self._by_rank[rank])]
        of_node = self._of_node.get(rank // self._ranks_per_node)
        return (1, of_node) if of_node else (2, self._all)


def _pieces(shards: Sequence[RankShards]) -> Iterable[tuple[int, Piece]]:
    return (
        (rank, piece) for rank, tensors in enumerate(shards) for tensor in tensors.values() for piece in tensor.pieces
    )


def _cover(rank: int, target: Piece, near: list[_Held]) -> list[tuple[Box, _Held]]:
    """Split the target's box into disjoint parts, each with the first of `near` that holds it."""
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
