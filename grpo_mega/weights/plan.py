"""Plans: which slices go from which rank to which, so that every target holds what its layout wants.

`plan(sources, targets)` intersects the boxes of both sides. Each element a target holds is fetched exactly once, from its own
rank where that holds it, else from the holder that has sent least so far; so the bytes moved equal the lower bound (what the
targets hold, less what they have already). The result is the same on every rank that computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Box, Holding, Index, Piece


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy `source[source_offset : + shape]` of one rank to `target[target_offset : + shape]` of another (or the same)."""

    source_rank: int
    target_rank: int
    source: str
    target: str
    source_offset: Index
    target_offset: Index
    box: Box

    @property
    def size(self) -> int:
        return self.box.size


def plan(sources: Sequence[Holding], targets: Sequence[Holding]) -> list[Transfer]:
    """Transfers from `sources[rank]` to `targets[rank]`, ordered by Hugging Face tensor.

    Raises WeightMappingError if a target wants what no source holds.
    """
    holders: dict[str, dict[Box, list[tuple[int, Piece]]]] = defaultdict(lambda: defaultdict(list))
    for rank, holding in enumerate(sources):
        for tensor in holding.values():
            for piece in tensor.pieces:
                holders[piece.box.tensor][piece.box].append((rank, piece))
    wanted: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, holding in enumerate(targets):
        for tensor in holding.values():
            for piece in tensor.pieces:
                wanted[piece.box.tensor].append((rank, piece))
    sent = [0] * len(sources)  # elements, to spread the load over replicas
    return [t for name in wanted for rank, piece in wanted[name] for t in _fetch(rank, piece, holders[name], sent)]


def _fetch(target_rank: int, target: Piece, holders: dict[Box, list[tuple[int, Piece]]], sent: list[int]) -> list[Transfer]:
    def is_remote(box: Box) -> bool:
        return all(rank != target_rank for rank, _ in holders[box])

    transfers: list[Transfer] = []
    missing = [target.box]
    for box in sorted(holders, key=is_remote):
        still_missing: list[Box] = []
        for need in missing:
            part = need.intersect(box)
            if part is None:
                still_missing.append(need)
                continue
            still_missing.extend(need.subtract(part))
            rank, piece = min(holders[box], key=lambda h: (h[0] != target_rank, sent[h[0]], h[0]))
            sent[rank] += part.size if rank != target_rank else 0
            transfers.append(Transfer(rank, target_rank, piece.local, target.local, piece.at(part), target.at(part), part))
        missing = still_missing
        if not missing:
            return transfers
    raise WeightMappingError(f"no rank holds {missing[0]} which {target.local} of rank {target_rank} needs")
