"""What rank holds what, filled with numbers that cannot be confused, and a plan's execution in one process.

A "side" is the holdings of all ranks of a Megatron layout, or of engines with whole Hugging Face tensors. Weights are int64
numbers, all different and none 0: a wrong, missing or doubled element cannot go unseen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_mega.weights.apply import fill
from grpo_mega.weights.boxes import Box, Holding, region
from grpo_mega.weights.layout import MegatronLayout, megatron_holding
from grpo_mega.weights.plan import Transfer
from grpo_mega.weights.spec import Family, ModelShape

Tensors = dict[str, Tensor]


def megatron_side(family: Family, shape: ModelShape, layout: MegatronLayout, *, fused_norms: bool = False) -> list[Holding]:
    return [megatron_holding(family, shape, layout, rank, fused_norms=fused_norms) for rank in range(layout.world_size)]


def numbered(family: Family, shape: ModelShape) -> Tensors:
    """Every tensor of the checkpoint; the elements of all of them together are 1, 2, 3, ..."""
    shapes = family.hf_tensors(shape)
    ends = torch.tensor([math.prod(s) for s in shapes.values()]).cumsum(0).tolist()
    numbers = {name: torch.arange(end - math.prod(s), end) for (name, s), end in zip(shapes.items(), ends, strict=True)}
    return {name: 1 + values.reshape(shapes[name]) for name, values in numbers.items()}


def slice_of(tensors: Tensors, box: Box) -> Tensor:
    return tensors[box.tensor][region(box.start, box.shape)]


def blank(side: Sequence[Holding]) -> list[Tensors]:
    """Each rank's tensors, all 0."""
    return [{name: torch.zeros(local.shape, dtype=torch.int64) for name, local in holding.items()} for holding in side]


def filled(side: Sequence[Holding], tensors: Tensors) -> list[Tensors]:
    """Each rank's tensors as a load gives them."""
    ranks = blank(side)
    for holding, local in zip(side, ranks, strict=True):
        fill(holding, local, lambda box: slice_of(tensors, box))
    return ranks


def simulate(transfers: Sequence[Transfer], sources: list[Tensors], targets: list[Tensors]) -> None:
    """Carries a plan out for all ranks at once; every transfer must bring something new."""
    for t in transfers:
        taken = sources[t.source_rank][t.source][region(t.source_offset, t.box.shape)]
        place = targets[t.target_rank][t.target][region(t.target_offset, t.box.shape)]
        assert not place.any(), f"{t} overwrites what another transfer brought"
        place.copy_(taken)


def assert_equal(found: list[Tensors], expected: list[Tensors]) -> None:
    assert len(found) == len(expected)
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), f"rank {rank}, {name}"
