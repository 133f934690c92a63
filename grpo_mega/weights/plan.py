"""Plans: the transfers from one shard layout to another, described once for all layers and experts that repeat.

Layers of one pipeline chunk have the same shards in both layouts. So a plan has transfers with {i} in their names, and the
layers for which they repeat. `traffic` counts the bytes and `rounds` returns the order, without writing out all transfers.
Every rank computes the same plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Kind, RankShards
from grpo_mega.weights.layout import ShardLayout
from grpo_mega.weights.rounds import Rounds, make_rounds
from grpo_mega.weights.spec import BLOCK
from grpo_mega.weights.transfers import Need, Place, Template, Transfer, choose, match

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
class Plan:
    templates: tuple[Template, ...]
    world_size: int
    ranks_per_node: int
    _rounds: dict[tuple[int, int], Rounds] = field(default_factory=dict, repr=False, compare=False)

    def transfers(self) -> Iterator[Transfer]:
        """Yield all transfers, one by one; for small models only."""
        return (one.at(t, place) for one in self.templates for place in one.places for t in one.transfers)

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
        """Return the transfers in rounds of at most `capacity` bytes per rank. Rounds are computed once per size."""
        key = capacity, itemsize
        if key not in self._rounds:
            self._rounds[key] = make_rounds(self.templates, self.world_size, capacity, itemsize)
        return self._rounds[key]


def plan_transfers(sources: ShardLayout, targets: ShardLayout, *, ranks_per_node: int) -> Plan:
    """Plan the transfers from one shard layout to another, in time that does not grow with the number of layers and experts.

    Raise WeightMappingError if a target needs an element that no source has, or if an FP8 block would come from several ranks.
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
            num_places += len(layers) * len(experts)
            needs = match(source_shards, target_shards, ranks_per_node)
            firsts = (extent.first_layer, extent.experts.start), (wanted.first_layer, wanted.experts.start)
            made = _templates(needs, layers, experts, firsts, sent)
            templates += (_quantised(template, targets.quantised) for template in made) if targets.quantised else made
        if num_places != len(wanted.layers) * len(wanted.experts):
            raise WeightMappingError(f"the targets need {wanted}, and the sources lack some; plan for one and the same model")
    return Plan(tuple(templates), world_size, ranks_per_node)


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


def _templates(
    needs: list[Need], layers: range, experts: range, firsts: tuple[Place, Place], sent: list[int]
) -> Iterator[Template]:
    """Yield one template. If it would leave some sources without work, yield several with different sources."""
    num_places = len(layers) * len(experts)
    step = min(num_places, _num_choices(needs))
    for start in range(step):
        places = range(start, num_places, step)
        yield Template(tuple(choose(needs, sent, len(places))), layers, experts, places, *firsts)


def _quantised(template: Template, tensors: frozenset[str]) -> Template:
    """Mark the transfers of these tensors as quantised."""
    transfers = []
    for transfer in template.transfers:
        box = transfer.box
        if box.tensor in tensors:
            # The boxes of a tensor cover it. If all of them start at a block's start, they also end at a block's end.
            if any(start % BLOCK for start in box.start):
                raise WeightMappingError(
                    f"a rank has {box.tensor} from {box.start}, inside a block of {BLOCK} that is quantised as a whole; "
                    "use other tensor-parallel sizes, or do not quantise"
                )
            transfer = transfer._replace(is_quantised=True)
        transfers.append(transfer)
    return replace(template, transfers=tuple(transfers))


def _num_choices(needs: list[Need]) -> int:
    """Return how often to choose sources for the same needs, based on the group of sources with the most elements."""
    num_needs: dict[int, int] = defaultdict(int)
    num_elements: dict[int, int] = defaultdict(int)
    num_sources: dict[int, int] = {}
    for need in needs:
        if len(need.sources) > 1:
            group = id(need.sources)
            num_needs[group] += 1
            num_elements[group] += need.part.size
            num_sources[group] = len(need.sources)
    if not num_needs:
        return 1
    group = max(num_elements, key=lambda g: num_elements[g])
    return math.ceil(_SHARES * num_sources[group] / num_needs[group])
