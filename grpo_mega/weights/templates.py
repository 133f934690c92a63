"""Transfers that are made alike for several layers and experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grpo_mega.weights.boxes import ONCE, Box
from grpo_mega.weights.transfers import Transfer

Place = tuple[int, int]  # of a layer and an expert


@dataclass(frozen=True)
class Template:
    """Transfers whose names leave layer and expert open as {i} and {e}, and the places at which they are made.

    Places are counted layer by layer: the one with number n is expert n % len(experts) of layer n // len(experts).
    """

    transfers: tuple[Transfer, ...]
    layers: range = ONCE
    experts: range = ONCE
    places: range = ONCE  # at which the transfers are made; templates of other givers have the rest
    source_first: Place = (0, 0)  # what the numbers in local names count from
    target_first: Place = (0, 0)

    @cached_property
    def num_places(self) -> int:
        return len(self.layers) * len(self.experts)

    def at(self, transfer: Transfer, place: int) -> Transfer:
        """One of the transfers, with the names of a place."""
        i, e = self.layers[place // len(self.experts)], self.experts[place % len(self.experts)]
        box = transfer.box
        return Transfer(
            transfer.source_rank,
            transfer.target_rank,
            transfer.source.format(i=i - self.source_first[0], e=e - self.source_first[1]),
            transfer.target.format(i=i - self.target_first[0], e=e - self.target_first[1]),
            transfer.source_offset,
            transfer.target_offset,
            Box(box.tensor.format(i=i, e=e), box.start, box.stop),
            transfer.is_quantised,
        )
