"""Plans: the transfers that lead from one side to another, said once for all layers and experts that move alike.

Layers of one pipeline chunk are held alike on both sides, so a plan holds transfers with names that leave the layer open, and
the layers they repeat for. What a plan moves is told without writing it out; `rounds` says in which order. `plan` is for
arbitrary holdings. A plan is the same on every rank that makes it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Holding, Kind
from grpo_mega.weights.rounds import Rounds, make_rounds
from grpo_mega.weights.sides import Side
from grpo_mega.weights.spec import BLOCK
from grpo_mega.weights.templates import Place, Template
from grpo_mega.weights.transfers import Need, Transfer, choose, match

__all__ = ["Plan", "Traffic", "Transfer", "plan", "plan_sides"]

_SHARES = 4  # a giver's average share of the largest tensor is at least this many transfers, so that loads come out even


@dataclass(frozen=True)
class Traffic:
    """What a plan moves, in bytes."""

    same_rank: int
    same_node: int  # between ranks of a node
    between_nodes: int
    sent: tuple[int, ...]  # by rank, to others
    received: tuple[int, ...]  # by rank, from others

    @property
    def moved(self) -> int:
        """Between ranks."""
        return self.same_node + self.between_nodes


@dataclass(frozen=True)
class Plan:
    templates: tuple[Template, ...]
    world_size: int
    ranks_per_node: int
    _rounds: dict[tuple[int, int], Rounds] = field(default_factory=dict, repr=False, compare=False)

    def transfers(self) -> Iterator[Transfer]:
        """All of them, one by one; for small models."""
        return (one.at(t, place) for one in self.templates for place in one.places for t in one.transfers)

    def traffic(self, itemsize: int) -> Traffic:
        """What moves if an element that is not quantised takes `itemsize` bytes."""
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
        """The order of the transfers in rounds of at most `capacity` bytes a rank; made once for each."""
        key = capacity, itemsize
        if key not in self._rounds:
            self._rounds[key] = make_rounds(self.templates, self.world_size, capacity, itemsize)
        return self._rounds[key]


def plan(sources: Sequence[Holding], targets: Sequence[Holding], *, ranks_per_node: int | None = None) -> list[Transfer]:
    """Transfers from `sources[rank]` to `targets[rank]`, ordered by Hugging Face tensor. `ranks_per_node`: None for one node.

    Raises WeightMappingError if a target wants what no source holds.
    """
    world_size = max(len(sources), len(targets))
    return choose(match(sources, targets, ranks_per_node or world_size), [0] * world_size)


def plan_sides(sources: Side, targets: Side, *, ranks_per_node: int) -> Plan:
    """From one side to the other, in time that does not grow with the number of layers and experts.

    Raises WeightMappingError if a target wants what no source holds, or if a block of FP8 would have to come from several.
    """
    world_size = max(sources.world_size, targets.world_size)
    sent = [0] * world_size
    templates: list[Template] = []
    held = _by_extent(sources)
    for wanted, holdings in _by_extent(targets).items():
        num_places = 0
        for extent, source_holdings in held.items():
            layers, experts = _common(extent.layers, wanted.layers), _common(extent.experts, wanted.experts)
            if extent.kind != wanted.kind or not layers or not experts:
                continue
            num_places += len(layers) * len(experts)
            needs = match(source_holdings, holdings, ranks_per_node)
            firsts = (extent.layers.start, extent.experts.start), (wanted.layers.start, wanted.experts.start)
            found = _templates(needs, layers, experts, firsts, sent)
            templates += (_quantised(template, targets.quantised) for template in found) if targets.quantised else found
        if num_places != len(wanted.layers) * len(wanted.experts):
            raise WeightMappingError(f"the targets want {wanted}, of which no rank holds some; plan for one and the same model")
    return Plan(tuple(templates), world_size, ranks_per_node)


@dataclass(frozen=True)
class _Extent:
    kind: Kind
    layers: range
    experts: range

    def __str__(self) -> str:
        layers, experts = (f"{r.start} to {r.stop - 1}" for r in (self.layers, self.experts))
        return f"tensors of kind {self.kind!r}, layers {layers}, experts {experts}"


def _by_extent(side: Side) -> dict[_Extent, list[Holding]]:
    """What each rank holds of the blocks with the same layers and experts, whose names are left open."""
    found: dict[_Extent, list[Holding]] = {}
    for rank, blocks in enumerate(side.blocks):
        for block in blocks:
            of_rank = found.setdefault(_Extent(block.kind, block.layers, block.experts), [{}] * side.world_size)
            of_rank[rank] = of_rank[rank] | block.tensors
    return found


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _templates(
    needs: list[Need], layers: range, experts: range, firsts: tuple[Place, Place], sent: list[int]
) -> Iterator[Template]:
    """Several, each with other givers, where one would leave some givers without work."""
    num_places = len(layers) * len(experts)
    step = min(num_places, _num_choices(needs))
    for start in range(step):
        places = range(start, num_places, step)
        yield Template(tuple(choose(needs, sent, len(places))), layers, experts, places, *firsts)


def _quantised(template: Template, tensors: frozenset[str]) -> Template:
    """With the transfers of these tensors marked as quantised."""
    transfers = []
    for transfer in template.transfers:
        box = transfer.box
        if box.tensor in tensors:
            # The boxes of a tensor cover it: where all of them begin with a block, they end with one too.
            if any(start % BLOCK for start in box.start):
                raise WeightMappingError(
                    f"a rank has {box.tensor} from {box.start}, amid a block of {BLOCK} that is quantised as a whole; "
                    "use other tensor-parallel sizes, or do not quantise"
                )
            transfer = transfer._replace(is_quantised=True)
        transfers.append(transfer)
    return replace(template, transfers=tuple(transfers))


def _num_choices(needs: list[Need]) -> int:
    """How many times to choose givers for the same needs, judged by those that have the most to give."""
    num_needs: dict[int, int] = defaultdict(int)
    num_elements: dict[int, int] = defaultdict(int)
    num_givers: dict[int, int] = {}
    for need in needs:
        if len(need.givers) > 1:
            group = id(need.givers)
            num_needs[group] += 1
            num_elements[group] += need.part.size
            num_givers[group] = len(need.givers)
    if not num_needs:
        return 1
    group = max(num_elements, key=lambda g: num_elements[g])
    return math.ceil(_SHARES * num_givers[group] / num_needs[group])
