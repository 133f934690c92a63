"""Plans: the transfers from one shard layout to another, described once for all layers and experts that repeat.

Layers of one pipeline chunk have the same shards in both layouts. So a plan has transfers with {i} in their names, and
the layers for which they repeat. `traffic` counts the bytes and `rounds` returns the order, without writing out all
transfers. Every rank computes the same plan and the same rounds.

In one round each rank sends and receives at most `capacity` bytes. Slices that stay on a rank count as received. All
parts of a plan advance together, in proportion to their length, so the senders of all pipeline stages have work in
every round.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Box, Kind, RankShards
from grpo_mega.weights.layout import ShardLayout
from grpo_mega.weights.spec import BLOCK
from grpo_mega.weights.transfers import Need, Template, Transfer, choose_sources, match

_GRAIN = 4  # a tensor is split until no rank sends or receives more than 1 / _GRAIN of a round at a time
_SHARES = 4  # a source gets at least this many transfers of the largest tensor on average, so loads come out even


@dataclass(frozen=True)
class Traffic:
    """The bytes that a plan moves."""

    same_rank: int
    same_node: int  # between ranks of a node
    between_nodes: int
    sent: tuple[int, ...]  # per rank, to other ranks
    received: tuple[int, ...]  # per rank, from other ranks

    @property
    def moved(self) -> int:
        """Return the bytes between ranks."""
        return self.same_node + self.between_nodes


@dataclass(frozen=True)
class _Unit:
    """Transfers of one tensor that go into the same round, at each place of their template."""

    template: Template
    by_rank: dict[int, list[Transfer]]  # the transfers in which a rank takes part
    load: NDArray[np.int64]  # [2 * world]: bytes that each rank sends, then bytes that each rank receives


@dataclass(frozen=True)
class Rounds:
    """The order in which the ranks execute a plan together, so that no buffer exceeds its limit."""

    units: list[list[tuple[_Unit, int]]]  # per round: units, each with its place

    def __len__(self) -> int:
        return len(self.units)

    def of(self, index: int, rank: int) -> list[Transfer]:
        """Return a rank's transfers of a round. The sender and the receiver of a transfer see it in the same order."""
        return [unit.template.at(t, place) for unit, place in self.units[index] for t in unit.by_rank.get(rank, ())]


@dataclass(frozen=True)
class TransferPlan:
    templates: tuple[Template, ...]
    world_size: int
    ranks_per_node: int
    _rounds: dict[tuple[int, int], Rounds] = field(default_factory=dict, repr=False, compare=False)

    def traffic(self, itemsize: int) -> Traffic:
        """Count the bytes, with `itemsize` bytes per element that is not quantised."""
        same_rank = same_node = between_nodes = 0
        sent, received = [0] * self.world_size, [0] * self.world_size
        for template in self.templates:
            factor = len(template.places)
            for transfer in template.transfers:
                num_bytes = transfer.num_bytes(itemsize) * factor
                source, target = transfer.source_rank, transfer.target_rank
                if source == target:
                    same_rank += num_bytes
                    continue
                sent[source] += num_bytes
                received[target] += num_bytes
                if source // self.ranks_per_node == target // self.ranks_per_node:
                    same_node += num_bytes
                else:
                    between_nodes += num_bytes
        return Traffic(same_rank, same_node, between_nodes, tuple(sent), tuple(received))

    def rounds(self, capacity: int, itemsize: int = 1) -> Rounds:
        """Return the transfers in rounds of at most `capacity` bytes per rank. Rounds are computed once per size.

        A transfer of more than `capacity` bytes is split along dim 0; a larger single row goes alone. An element takes
        `itemsize` bytes. A quantised tensor is split only between rows of blocks, so 128 rows go alone.
        """
        key = capacity, itemsize
        if key in self._rounds:
            return self._rounds[key]
        steps = []
        for number, template in enumerate(self.templates):
            for tensor, units in enumerate(_units(template, self.world_size, capacity, itemsize)):
                for j, unit in enumerate(units):
                    share = (j + 0.5) / len(units)
                    for place in template.places:
                        steps.append(((place + share) / template.num_places, tensor, number, place, unit))
        steps.sort(key=lambda step: step[:4])
        rounds: list[list[tuple[_Unit, int]]] = []
        used = np.zeros(2 * self.world_size, dtype=np.int64)
        for *_, place, unit in steps:
            used += unit.load
            if not rounds or used.max() > capacity:
                rounds.append([])
                used[:] = unit.load
            rounds[-1].append((unit, place))
        self._rounds[key] = Rounds(rounds)
        return self._rounds[key]


def plan_transfers(sources: ShardLayout, targets: ShardLayout, *, ranks_per_node: int) -> TransferPlan:
    """Plan the transfers from one shard layout to another, in time that does not grow with the number of layers and
    experts.

    Raise WeightMappingError if a target needs an element that no source has, or if an FP8 block would come from several
    ranks.
    """
    world_size = max(sources.world_size, targets.world_size)
    sent = [0] * world_size
    templates: list[Template] = []
    held = _by_extent(sources)
    for wanted, target_shards in _by_extent(targets).items():
        num_places = 0
        for extent, source_shards in held.items():
            layers, experts = _common(extent.layers, wanted.layers), _common(extent.experts, wanted.experts)
            if extent.kind != wanted.kind or not layers or not experts:
                continue
            num_common = len(layers) * len(experts)
            num_places += num_common
            needs = match(source_shards, target_shards, ranks_per_node)
            firsts = (extent.first_layer, extent.experts.start), (wanted.first_layer, wanted.experts.start)
            step = min(num_common, _num_choices(needs))
            for start in range(step):
                places = range(start, num_common, step)
                transfers = choose_sources(needs, sent, len(places), targets.quantised)
                templates.append(Template(tuple(transfers), layers, experts, places, *firsts))
        if num_places != len(wanted.layers) * len(wanted.experts):
            raise WeightMappingError(
                f"the source layout lacks a part of {wanted}; source and target must be the same model"
            )
    return TransferPlan(tuple(templates), world_size, ranks_per_node)


@dataclass(frozen=True)
class _Extent:
    kind: Kind
    layers: range
    experts: range
    first_layer: int

    def __str__(self) -> str:
        layers, experts = (f"{r.start} to {r.stop - 1}" for r in (self.layers, self.experts))
        return f"tensors of kind {self.kind!r}, layers {layers}, experts {experts}"


def _by_extent(layout: ShardLayout) -> dict[_Extent, list[RankShards]]:
    """Return the shards of each rank, keyed by the layers and experts for which they repeat. Names have {i} and {e}."""
    shards: dict[_Extent, list[RankShards]] = {}
    for rank, blocks in enumerate(layout.blocks):
        for block in blocks:
            by_rank = shards.setdefault(
                _Extent(block.kind, block.layers, block.experts, block.first_layer), [{}] * layout.world_size
            )
            by_rank[rank] = by_rank[rank] | block.tensors
    return shards


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _num_choices(needs: list[Need]) -> int:
    """Return how often to choose sources for the same needs, so that no source is left without work.

    The number depends on the group of sources with the most elements.
    """
    groups: dict[int, list[Need]] = defaultdict(list)
    for need in needs:
        if len(need.sources) > 1:
            groups[id(need.sources)].append(need)
    if not groups:
        return 1
    largest = max(groups.values(), key=lambda group: sum(need.part.size for need in group))
    return math.ceil(_SHARES * len(largest[0].sources) / len(largest))


def _units(template: Template, world_size: int, capacity: int, itemsize: int) -> Iterator[list[_Unit]]:
    """Yield the units of each Hugging Face tensor of a template. All ranks that need a tensor advance through it
    together.
    """
    grain = max(1, capacity // _GRAIN)
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
        # The receiving rank, and the complement (~) of the sending rank if it is a different rank.
        is_local = transfer.source_rank == transfer.target_rank
        ends = (transfer.target_rank,) if is_local else (transfer.target_rank, ~transfer.source_rank)
        size = transfer.num_bytes(itemsize)
        if part and any(used[end] + size > most for end in ends):
            yield part
            part = []
            used.clear()
        part.append(transfer)
        for end in ends:
            used[end] += size
    yield part


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
