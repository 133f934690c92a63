"""The shards of all ranks, filled with unique numbers, and execution of a plan in one process.

A "side" is the list of all ranks' shards, in a Megatron layout or in engines. Weights are different nonzero int64
numbers, so wrong, missing or duplicated elements are always detected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from grpo_mega.weights.apply import load_shards
from grpo_mega.weights.boxes import Box, RankShards, region
from grpo_mega.weights.layout import MegatronLayout, ShardLayout, megatron_shards
from grpo_mega.weights.plan import TransferPlan, plan_transfers
from grpo_mega.weights.spec import Family, ModelShape
from grpo_mega.weights.transfers import Transfer

Tensors = dict[str, Tensor]


def megatron_side(
    family: Family, shape: ModelShape, layout: MegatronLayout, *, fused_norms: bool = False
) -> list[RankShards]:
    shards = megatron_shards(family, shape, layout, fused_norms=fused_norms)
    return [shards.rank_shards(rank) for rank in range(layout.world_size)]


def numbered(family: Family, shape: ModelShape) -> Tensors:
    """Return all tensors of the checkpoint. Their elements are numbered 1, 2, 3, ... across tensors."""
    shapes = family.hf_tensors(shape)
    ends = torch.tensor([math.prod(s) for s in shapes.values()]).cumsum(0).tolist()
    numbers = {name: torch.arange(end - math.prod(s), end) for (name, s), end in zip(shapes.items(), ends, strict=True)}
    return {name: 1 + values.reshape(shapes[name]) for name, values in numbers.items()}


def slice_of(tensors: Tensors, box: Box) -> Tensor:
    return tensors[box.tensor][region(box.start, box.shape)]


def plan(
    sources: Sequence[RankShards], targets: Sequence[RankShards], ranks_per_node: int | None = None
) -> TransferPlan:
    """Plan transfers for shards listed per tensor. `ranks_per_node` None: all ranks are on one node."""
    ranks_per_node = ranks_per_node or max(len(sources), len(targets))
    return plan_transfers(ShardLayout.of_ranks(sources), ShardLayout.of_ranks(targets), ranks_per_node=ranks_per_node)


def blank(side: Sequence[RankShards]) -> list[Tensors]:
    """Return each rank's tensors, filled with 0."""
    return [{name: torch.zeros(local.shape, dtype=torch.int64) for name, local in shards.items()} for shards in side]


def filled(side: Sequence[RankShards], tensors: Tensors) -> list[Tensors]:
    """Return each rank's tensors after loading."""
    ranks = blank(side)
    for shards, local in zip(side, ranks, strict=True):
        load_shards(shards, local, lambda box: slice_of(tensors, box))
    return ranks


def simulate(transfers: Iterable[Transfer], sources: list[Tensors], targets: list[Tensors]) -> None:
    """Execute a plan for all ranks. No transfer may overwrite another one."""
    for t in transfers:
        taken = sources[t.source_rank][t.source][region(t.source_offset, t.box.shape)]
        place = targets[t.target_rank][t.target][region(t.target_offset, t.box.shape)]
        assert not place.any(), f"{t} overwrites another transfer"
        place.copy_(taken)


def lower_bound(source: RankShards, target: RankShards, tensors: Tensors) -> int:
    """Return how many elements a rank must receive: elements of its pieces that are not in its source pieces."""
    held: dict[str, torch.Tensor] = {}
    for local in source.values():
        for piece in local.pieces:
            held.setdefault(piece.box.tensor, torch.zeros(tensors[piece.box.tensor].shape, dtype=torch.bool))
            slice_of(held, piece.box).fill_(True)
    pieces = [piece for local in target.values() for piece in local.pieces]
    return sum(p.box.size - (int(slice_of(held, p.box).sum()) if p.box.tensor in held else 0) for p in pieces)


def assert_equal(found: list[Tensors], expected: list[Tensors]) -> None:
    assert len(found) == len(expected)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), f"rank {rank}, {name}"


def transfers_of(plan: TransferPlan) -> Iterator[Transfer]:
    """Yield all transfers of a plan, one by one; for small models only."""
    return (one.at(t, place) for one in plan.templates for place in one.places for t in one.transfers)
