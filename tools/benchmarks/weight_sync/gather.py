"""The baseline of the benchmark: every rank gathers all weights in full, then each engine rank takes its slices.

It works like other trainers with Megatron, tensor by tensor: a stage's shards are broadcast over the pipeline, gathered
over expert-parallel ranks if they hold different experts, and gathered over tensor-parallel ranks if they are sharded.
Groups and slices are computed once, buffers are reused, slices are copied directly from the gathered shards without
assembling whole tensors, and nothing is verified. A tied output layer and the replicas of a norm are gathered once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.weights.boxes import Index, LocalTensor, Piece, RankShards, region
from grpo_mega.weights.layout import MegatronLayout, ShardLayout


@dataclass(frozen=True)
class Slice:
    """A region `source` of one of the gathered shards, and its `place` in an engine's tensor."""

    shard: int
    source: tuple[slice, ...]
    target: str
    place: tuple[slice, ...]


@dataclass(frozen=True)
class Gathered:
    """A tensor of a pipeline stage."""

    name: str
    stage: int
    shape: Index  # shape of a shard; all shards have the same
    tp: int  # number of shards along the axis; 1 if the tensor is not sharded along it
    ep: int
    slices: tuple[Slice, ...]  # slices that this rank's engine needs


class FullGather:
    """One rank's part of the full gather. Collective: all ranks make one and call `run` together."""

    def __init__(self, trainer: ShardLayout, layout: MegatronLayout, wanted: RankShards, dtype: torch.dtype) -> None:
        self._layout = layout
        self._at = {layout.place(rank): rank for rank in range(layout.world_size)}
        self._place = layout.place(dist.get_rank())
        self._pp = self._group(lambda t, p, d: (t, d))
        self._ep = self._group(lambda t, p, d: (t, p, d // layout.ep))
        self._tp = self._group(lambda t, p, d: (p, d))
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for local in wanted.values():
            for piece in local.pieces:
                pieces[piece.box.tensor].append(piece)
        self._tensors = list(self._plan(trainer, pieces))
        most = max(math.prod(one.shape) * one.tp * one.ep for one in self._tensors)
        self._shard, self._of_ep, self._whole = (torch.empty(most, dtype=dtype) for _ in range(3))

    def run(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> int:
        """Fill the engine's tensors. Return the bytes that this rank received from other ranks."""
        num_bytes = 0
        tp_rank, pp_rank, dp_rank = self._place
        for tensor in self._tensors:
            is_own = pp_rank == tensor.stage
            shard = sources[tensor.name].flatten() if is_own else self._shard[: math.prod(tensor.shape)]
            if self._pp is not None:
                dist.broadcast(shard.view(torch.uint8), self._at[tp_rank, tensor.stage, dp_rank], group=self._pp)
            of_ep = _all_gather(shard, self._of_ep, tensor.ep, self._ep)
            gathered = _all_gather(of_ep, self._whole, tensor.tp, self._tp)
            num_bytes += gathered.nbytes - is_own * shard.nbytes
            shards = gathered.view(tensor.tp * tensor.ep, *tensor.shape)
            for s in tensor.slices:
                targets[s.target][s.place].copy_(shards[s.shard][s.source])
        return num_bytes

    def _group(self, key: Callable[[int, int, int], Index]) -> dist.ProcessGroup | None:
        """Return the group of ranks with this rank's key; None if it is alone. Collective."""
        members: dict[Index, list[int]] = defaultdict(list)
        for place, rank in sorted(self._at.items()):
            members[key(*place)].append(rank)
        groups = {k: dist.new_group(ranks) for k, ranks in members.items() if len(ranks) > 1}
        return groups.get(key(*self._place))

    def _plan(self, trainer: ShardLayout, wanted: Mapping[str, Sequence[Piece]]) -> Iterator[Gathered]:
        layout, seen = self._layout, set[str]()
        for stage in range(layout.pp):
            shards = [[trainer.rank_shards(self._at[t, stage, e]) for e in range(layout.ep)] for t in range(layout.tp)]
            for name, first in shards[0][0].items():
                tp = 1 if all(of_tp[0][name].pieces == first.pieces for of_tp in shards) else layout.tp
                ep = 1 if all(shard[name].pieces == first.pieces for shard in shards[0]) else layout.ep
                locals_ = [shards[t][e][name] for t in range(tp) for e in range(ep)]
                if not {piece.box.tensor for piece in first.pieces} <= seen:
                    yield Gathered(name, stage, first.shape, tp, ep, tuple(_slices(locals_, wanted)))
                seen |= {piece.box.tensor for local in locals_ for piece in local.pieces}


def _slices(shards: Sequence[LocalTensor], wanted: Mapping[str, Sequence[Piece]]) -> Iterator[Slice]:
    for number, local in enumerate(shards):
        for piece in local.pieces:
            for want in wanted.get(piece.box.tensor, ()):
                if (part := piece.box.intersect(want.box)) is not None:
                    source, place = region(piece.at(part), part.shape), region(want.at(part), part.shape)
                    yield Slice(number, source, want.local, place)


def _all_gather(values: Tensor, buffer: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the `count` shards of a group into the buffer, or return the values if count is 1."""
    if count == 1:
        return values
    found = buffer[: count * values.numel()]
    dist.all_gather_single(found.view(torch.uint8), values.view(torch.uint8), group=group)
    return found
