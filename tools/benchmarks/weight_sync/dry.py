"""Compute the bytes that a weight sync would move, from shapes and layouts. No tensors are made and no ranks are
started.

`dry_run` uses the transfer plan. The bounds are computed without the plan, from the slices that ranks hold.
`lower_bound` counts the weights that an engine needs and its rank does not have. `full_gather_bytes` counts the weights
that ranks would receive if each gathered all weights. It excludes weights that the rank already holds, padding, and a
second copy of a tied output layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import starmap

from grpo_mega.weights.boxes import Block, Box
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import (
    EngineLayout,
    MegatronLayout,
    ShardLayout,
    engine_shards,
    hf_shards,
    megatron_shards,
)
from grpo_mega.weights.plan import Traffic, plan_transfers
from grpo_mega.weights.spec import ModelShape

ITEM_BYTES = 2  # weights move in bfloat16


@dataclass(frozen=True)
class Spec:
    """The weight sync to measure. Ranks are numbered node by node."""

    shape: ModelShape
    source: MegatronLayout
    target: EngineLayout
    ranks_per_node: int
    bucket_bytes: int


@dataclass(frozen=True)
class Dry:
    """The bytes that a sync would move."""

    traffic: Traffic
    lower_bound: int
    full_gather_bytes: int
    num_rounds: int
    plan_seconds: float  # time before the first byte of the first sync: both shard layouts, the plan and its rounds


def dry_run(spec: Spec) -> Dry:
    family = family_of(spec.shape.model_type)
    world_size = max(spec.source.world_size, spec.target.world_size)
    started_at = time.perf_counter()
    trainer = megatron_shards(family, spec.shape, spec.source)
    engines = engine_shards(family, spec.shape, spec.target, world_size)
    plan = plan_transfers(trainer, engines, ranks_per_node=spec.ranks_per_node)
    num_rounds = len(plan.rounds(spec.bucket_bytes, ITEM_BYTES))
    seconds = time.perf_counter() - started_at
    return Dry(
        plan.traffic(ITEM_BYTES),
        ITEM_BYTES * lower_bound(trainer, engines),
        ITEM_BYTES * full_gather(trainer, num_parameters(spec.shape), world_size),
        num_rounds,
        seconds,
    )


def num_parameters(shape: ModelShape) -> int:
    return num_elements(hf_shards(family_of(shape.model_type), shape, 1).blocks[0])


def lower_bound(sources: ShardLayout, targets: ShardLayout) -> int:
    """Return the number of elements that ranks need and do not have. A rank's source tensors must not overlap."""
    ranks = zip(targets.blocks, (*sources.blocks, *[()] * targets.world_size), strict=False)
    return sum(num_elements(wanted) - num_common(held, wanted) for wanted, held in ranks)


def full_gather(sources: ShardLayout, num_parameters: int, world_size: int) -> int:
    """Return the number of elements that all ranks receive if each of them gathers all weights."""
    return num_parameters * world_size - sum(map(num_elements, sources.blocks))


def num_elements(blocks: Iterable[Block]) -> int:
    """Return the number of elements of all pieces."""
    return sum(
        len(block.layers)
        * len(block.experts)
        * sum(piece.box.size for t in block.tensors.values() for piece in t.pieces)
        for block in blocks
    )


def num_common(first: Iterable[Block], second: Iterable[Block]) -> int:
    """Return the number of elements that are in both."""
    second = list(second)
    return sum(
        num_shared(a.layers, b.layers) * num_shared(a.experts, b.experts) * num_overlapping(a, b)
        for a in first
        for b in second
        if a.kind == b.kind
    )


def num_overlapping(a: Block, b: Block) -> int:
    """Return the number of common elements in one layer and one expert that both have."""
    boxes = [[piece.box for t in block.tensors.values() for piece in t.pieces] for block in (a, b)]
    return sum(overlap(x, y) for x in boxes[0] for y in boxes[1] if x.tensor == y.tensor)


def overlap(a: Box, b: Box) -> int:
    return math.prod(starmap(num_shared, zip(map(range, a.start, a.stop), map(range, b.start, b.stop), strict=True)))


def num_shared(a: range, b: range) -> int:
    return max(0, min(a.stop, b.stop) - max(a.start, b.start))
