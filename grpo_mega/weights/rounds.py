"""Rounds: the order in which the ranks execute a plan together, so that no buffer exceeds its limit.

In one round each rank sends and receives at most `capacity` bytes. Slices that stay on a rank count as received. All parts of a
plan advance together, in proportion to their length, so the senders of all pipeline stages have work in every round. Rounds
depend only on the plan, so every rank computes the same ones.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from grpo_mega.weights.boxes import Box
from grpo_mega.weights.spec import BLOCK
from grpo_mega.weights.transfers import Template, Transfer

GRAIN = 4  # a tensor is split until no rank sends or receives more than 1/GRAIN of a round at a time


@dataclass(frozen=True)
class _Unit:
    """Transfers of one tensor that go into the same round, at each place of their template."""

    template: Template
    by_rank: dict[int, list[Transfer]]  # the transfers in which a rank takes part
    load: NDArray[np.int64]  # [2 * world]: bytes that each rank sends, then bytes that each rank receives


@dataclass(frozen=True)
class Rounds:
    units: list[list[tuple[_Unit, int]]]  # per round: units, each with its place

    def __len__(self) -> int:
        return len(self.units)

    def of(self, index: int, rank: int) -> list[Transfer]:
        """Return a rank's transfers of a round. The sender and the receiver of a transfer see it in the same order."""
        return [unit.template.at(t, place) for unit, place in self.units[index] for t in unit.by_rank.get(rank, ())]


def make_rounds(templates: Sequence[Template], world_size: int, capacity: int, itemsize: int) -> Rounds:
    """Order all transfers. Transfers of more than `capacity` bytes are split along dim 0; a larger single row goes alone.

    An element takes `itemsize` bytes. A quantised tensor is split only between rows of blocks, so 128 rows go alone.
    """
    steps = []
    for number, template in enumerate(templates):
        for tensor, units in enumerate(_units(template, world_size, capacity, itemsize)):
            for j, unit in enumerate(units):
                share = (j + 0.5) / len(units)
                steps += [((place + share) / template.num_places, tensor, number, place, unit) for place in template.places]
    steps.sort(key=lambda step: step[:4])
    rounds: list[list[tuple[_Unit, int]]] = []
    used = np.zeros(2 * world_size, dtype=np.int64)
    for *_, place, unit in steps:
        used += unit.load
        if not rounds or used.max() > capacity:
            rounds.append([])
            used[:] = unit.load
        rounds[-1].append((unit, place))
    return Rounds(rounds)


def _units(template: Template, world_size: int, capacity: int, itemsize: int) -> Iterator[list[_Unit]]:
    """Yield the units of each Hugging Face tensor of a template. All ranks that need a tensor advance through it together."""
    grain = max(1, capacity // GRAIN)
    of_tensor: dict[str, list[Transfer]] = defaultdict(list)
    for transfer in template.transfers:
        of_tensor[transfer.box.tensor].append(transfer)
    for transfers in of_tensor.values():
        whole = _unit(template, transfers, world_size, itemsize)
        num_cuts = math.ceil(whole.load.max() / grain)
        if num_cuts == 1:
            yield [whole]
            continue
        cuts = zip_longest(*(_cut(t, num_cuts) for t in transfers))
        yield [
            _unit(template, part, world_size, itemsize)
            for cut in cuts
            for part in _parts([t for t in cut if t is not None], capacity, itemsize)
        ]


def _cut(transfer: Transfer, num_cuts: int) -> Iterator[Transfer]:
    """Split a transfer into `num_cuts` runs of rows, or into single rows (or rows of blocks) if it has fewer."""
    box = transfer.box
    rows = box.stop[0] - box.start[0]
    step = math.ceil(rows / num_cuts)
    if transfer.is_quantised:
        step = math.ceil(step / BLOCK) * BLOCK
    for row in range(0, rows, step):
        start, end = box.start[0] + row, min(box.start[0] + row + step, box.stop[0])
        yield transfer._replace(
            source_offset=(transfer.source_offset[0] + row, *transfer.source_offset[1:]),
            target_offset=(transfer.target_offset[0] + row, *transfer.target_offset[1:]),
            box=Box(box.tensor, (start, *box.start[1:]), (end, *box.stop[1:])),
        )


def _parts(transfers: list[Transfer], most: int, itemsize: int) -> Iterator[list[Transfer]]:
    """Split into runs in which no rank sends or receives more than `most` bytes, except in a single transfer."""
    part: list[Transfer] = []
    used: dict[int, int] = defaultdict(int)
    for transfer in transfers:
        ends, size = _ends(transfer), transfer.num_bytes(itemsize)
        if part and any(used[end] + size > most for end in ends):
            yield part
            part = []
            used.clear()
        part.append(transfer)
        for end in ends:
            used[end] += size
    yield part


def _ends(transfer: Transfer) -> tuple[int, ...]:
    """Return the receiving rank, and the complement (~) of the sending rank if it is a different rank."""
    is_local = transfer.source_rank == transfer.target_rank
    return (transfer.target_rank,) if is_local else (transfer.target_rank, ~transfer.source_rank)


def _unit(template: Template, transfers: list[Transfer], world_size: int, itemsize: int) -> _Unit:
    load = [0] * (2 * world_size)
    by_rank: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        source, target, size = transfer.source_rank, transfer.target_rank, transfer.num_bytes(itemsize)
        by_rank[target].append(transfer)
        load[world_size + target] += size
        if source != target:
            by_rank[source].append(transfer)
            load[source] += size
    return _Unit(template, dict(by_rank), np.array(load, dtype=np.int64))
