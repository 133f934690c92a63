"""The baseline of the benchmark: every rank gathers all weights in full, then each engine rank takes its slices.

It works like other trainers with Megatron. A stage's ranks pack their shards into a bucket. The bucket is broadcast
over the pipeline, gathered over expert-parallel ranks if it has sharded experts, and gathered over tensor-parallel
ranks if its tensors are sharded. The baseline is as fast as possible: gathered buckets are as large as the sync's,
buffers are reused, groups and slices are computed once, slices are copied directly from the gathered shards without
assembling whole tensors, and nothing is verified. A tied output layer is gathered once, and so are tensor-parallel
replicas of a norm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.weights.boxes import Box, Index, LocalTensor, Piece, RankShards, region
from grpo_mega.weights.layout import MegatronLayout, ShardLayout


@dataclass(frozen=True)
class Rows:
    """Some rows of a trainer's tensor at `start` of the shard's buffer. All shards have the same rows."""

    name: str
    first: int
    shape: Index
    start: int


@dataclass(frozen=True)
class Slice:
    """A region `source` of the shard at `gathered[start:]`, viewed as `shape`, and its `place` in an engine's
    tensor.
    """

    start: int
    shape: Index
    source: tuple[slice, ...]
    target: str
    place: tuple[slice, ...]


@dataclass(frozen=True)
class Bucket:
    stage: int
    tp: int  # number of shards along the axis; 1 if the tensors are not sharded along it
    ep: int
    rows: tuple[Rows, ...]
    num_elements: int  # elements per shard
    slices: tuple[Slice, ...]  # slices that this rank's engine needs


class FullGather:
    """One rank's part of the full gather. Collective: all ranks of the trainer's layout make one and call `run`
    together.
    """

    def __init__(
        self, trainer: ShardLayout, layout: MegatronLayout, wanted: RankShards, bucket_bytes: int, dtype: torch.dtype
    ) -> None:
        self._layout, self._dtype = layout, dtype
        self._at = {layout.place(rank): rank for rank in range(layout.world_size)}
        self._place = layout.place(dist.get_rank())
        self._pp = self._groups(lambda t, p, d: (t, d))
        self._ep = self._groups(lambda t, p, d: (t, p, d // layout.ep))
        self._tp = self._groups(lambda t, p, d: (p, d))
        self._buckets = list(self._make_buckets(trainer, _by_tensor(wanted), bucket_bytes // dtype.itemsize))
        shard = max(bucket.num_elements for bucket in self._buckets)
        whole = max(bucket.num_elements * bucket.tp * bucket.ep for bucket in self._buckets)
        self._shard, self._of_ep, self._whole = (torch.empty(size, dtype=dtype) for size in (shard, whole, whole))

    def run(self, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> int:
        """Fill the engine's tensors. Return the bytes that this rank received from other ranks."""
        num_bytes = 0
        for bucket in self._buckets:
            gathered, received = self._gather(bucket, sources)
            num_bytes += received
            for s in bucket.slices:
                shard = gathered[s.start : s.start + math.prod(s.shape)].view(s.shape)
                targets[s.target][s.place].copy_(shard[s.source])
        return num_bytes

    def _gather(self, bucket: Bucket, sources: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Return all shards of a bucket, [tp, ep, num_elements] flattened, and the bytes received for them."""
        shard, received = self._shard[: bucket.num_elements], 0
        tp_rank, pp_rank, dp_rank = self._place
        if pp_rank == bucket.stage:
            for rows in bucket.rows:
                taken = sources[rows.name][rows.first : rows.first + rows.shape[0]]
                shard[rows.start : rows.start + taken.numel()].view(rows.shape).copy_(taken)
        else:
            received += shard.nbytes
        if self._pp is not None:
            dist.broadcast(shard.view(torch.uint8), self._at[tp_rank, bucket.stage, dp_rank], group=self._pp)
        of_ep = _all_gather(shard, self._of_ep, bucket.ep, self._ep)
        whole = _all_gather(of_ep, self._whole, bucket.tp, self._tp)
        return whole, received + whole.nbytes - shard.nbytes

    def _groups(self, key: Callable[[int, int, int], Index]) -> dist.ProcessGroup | None:
        """Return the group of ranks with this rank's key; None if it is alone. Collective: every rank makes all
        groups.
        """
        members: dict[Index, list[int]] = defaultdict(list)
        for place, rank in sorted(self._at.items()):
            members[key(*place)].append(rank)
        groups = {k: dist.new_group(ranks) for k, ranks in members.items() if len(ranks) > 1}
        return groups.get(key(*self._place))

    def _make_buckets(self, trainer: ShardLayout, wanted: dict[str, list[Piece]], capacity: int) -> Iterator[Bucket]:
        layout, seen = self._layout, set[str]()
        for stage in range(layout.pp):
            holdings = [
                [trainer.rank_shards(self._at[t, stage, e]) for e in range(layout.ep)] for t in range(layout.tp)
            ]
            kinds: dict[tuple[int, int], list[str]] = defaultdict(list)
            for name, local in holdings[0][0].items():
                tensors = {piece.box.tensor for piece in local.pieces}
                if not tensors <= seen:
                    kinds[_num_shards(name, holdings)].append(name)
                seen |= {p.box.tensor for of_tp in holdings for holding in of_tp for p in holding[name].pieces}
            for (tp, ep), names in kinds.items():
                shards = [holdings[t][e] for t in range(tp) for e in range(ep)]
                for rows in _cut(names, shards[0], max(1, capacity // (tp * ep))):
                    num_elements = rows[-1].start + math.prod(rows[-1].shape)
                    slices = [
                        s
                        for i, shard in enumerate(shards)
                        for r in rows
                        for s in _slices(r, shard, i * num_elements, wanted)
                    ]
                    yield Bucket(stage, tp, ep, tuple(rows), num_elements, tuple(slices))


def _num_shards(name: str, holdings: Sequence[Sequence[RankShards]]) -> tuple[int, int]:
    """Return the number of different shards of a tensor along tp and ep."""
    first = holdings[0][0][name].pieces
    tp = 1 if all(of_tp[0][name].pieces == first for of_tp in holdings) else len(holdings)
    ep = 1 if all(holding[name].pieces == first for holding in holdings[0]) else len(holdings[0])
    return tp, ep


def _cut(names: list[str], shard: RankShards, capacity: int) -> Iterator[list[Rows]]:
    """Yield runs of rows with at most `capacity` elements, unless a single row has more."""
    bucket: list[Rows] = []
    used = 0
    for name in names:
        num_rows, *rest = shard[name].shape
        width, first = math.prod(rest), 0
        while first < num_rows:
            count = min(num_rows - first, max(0, capacity - used) // width)
            if count == 0 and bucket:
                yield bucket
                bucket, used = [], 0
                continue
            count = max(1, count)
            bucket.append(Rows(name, first, (count, *rest), used))
            first, used = first + count, used + count * width
    if bucket:
        yield bucket


def _slices(rows: Rows, shard: RankShards, start: int, wanted: dict[str, list[Piece]]) -> Iterator[Slice]:
    """Return the parts of some rows that the engine needs, for a shard that starts at `start`."""
    local: LocalTensor = shard[rows.name]
    for piece in local.pieces:
        first = max(rows.first, piece.offset[0])
        stop = min(rows.first + rows.shape[0], piece.offset[0] + piece.box.shape[0])
        if first >= stop:
            continue
        shift = piece.box.start[0] - piece.offset[0]
        part = Box(piece.box.tensor, (first + shift, *piece.box.start[1:]), (stop + shift, *piece.box.stop[1:]))
        for want in wanted.get(part.tensor, ()):
            common = part.intersect(want.box)
            if common is not None:
                row, *column = piece.at(common)
                source = region((row - rows.first, *column), common.shape)
                yield Slice(start + rows.start, rows.shape, source, want.local, region(want.at(common), common.shape))


def _by_tensor(holding: RankShards) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for local in holding.values():
        for piece in local.pieces:
            found[piece.box.tensor].append(piece)
    return found


def _all_gather(values: Tensor, buffer: Tensor, count: int, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the `count` shards of a group into the buffer, one after another. Return the values themselves if count is
    1.
    """
    if count == 1:
        return values
    found = buffer[: count * values.numel()]
    dist.all_gather_single(found.view(torch.uint8), values.view(torch.uint8), group=group)
    return found
