"""Load the shards of one rank, and execute plans between the ranks of a process group.

`load_shards` reads a rank's tensors from a checkpoint. `buckets` moves weights between ranks in rounds and yields the
received slices, round by round, in buffers of at most `bucket_bytes`, so the extra memory is a few buckets for any
model size. Ranks send slices to each other directly, and no round waits for all ranks. `execute` writes the slices into
plain tensors. Before they are sent, elements are cast to the target's dtype, or quantised if the plan says so. Each
slice may carry a checksum of the sent bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.weights.boxes import Box, Index, RankShards, region
from grpo_mega.weights.checksum import checksum
from grpo_mega.weights.plan import TransferPlan
from grpo_mega.weights.receive import Entry, quantise, subtensor, write_entries
from grpo_mega.weights.transfers import Transfer

NUM_FLYING = 2  # rounds on their way between ranks: the next round is packed while the last one is received


@dataclass(frozen=True)
class Bucket:
    """The slices that this rank received in one round. The bucket is complete when it is yielded."""

    index: int  # index of the round
    values: Tensor  # 1-D, bytes
    entries: tuple[Entry, ...]
    num_bytes_received: int  # received from other ranks; the rest was already on this rank
    dtype: torch.dtype  # dtype of all entries that are neither quantised nor float32


@torch.no_grad()
def load_shards(shards: RankShards, tensors: Mapping[str, Tensor], read: Callable[[Box], Tensor]) -> None:
    """Fill a rank's tensors with the slices that `read` returns; padding becomes zero."""
    for name, local in shards.items():
        if sum(p.box.size for p in local.pieces) < tensors[name].numel():
            tensors[name].zero_()
        for piece in local.pieces:
            tensors[name][region(piece.offset, piece.box.shape)].copy_(read(piece.box))


@torch.no_grad()
def execute(
    plan: TransferPlan,
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 256 << 20,
) -> int:
    """Execute this rank's part of a plan that all ranks of `group` share. Return the number of bytes received.

    `dtype` is the dtype of all targets. Every rank calls this with the same plan; `sources` and `targets` are the
    rank's own tensors.
    """
    device = next((t.device for t in chain(sources.values(), targets.values())), torch.device("cpu"))

    def allocate(index: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    num_bytes = 0
    for bucket in buckets(
        plan, sources, dtype=dtype, bucket_bytes=bucket_bytes, allocate=allocate, group=group, verify=False
    ):
        write_entries(bucket.entries, bucket.values, targets, dtype)
        num_bytes += bucket.num_bytes_received
    return num_bytes


@torch.no_grad()
def buckets(
    plan: TransferPlan,
    sources: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    allocate: Callable[[int, int], Tensor],
    group: dist.ProcessGroup | None = None,
    verify: bool = True,
) -> Iterator[Bucket]:
    """Yield this rank's buckets, one per round. Every rank of `group` calls this with the same plan and takes all its
    buckets.

    `dtype` is the dtype of all slices that are not quantised. `allocate(round, num_bytes)` returns the contiguous 1-D
    uint8 tensor that becomes a bucket's values. A bucket is not touched again after it is yielded. The buffer of the
    next round is allocated before a bucket is yielded, so that packing, sending and loading overlap. A rank that
    receives nothing in a round gets a bucket without entries. Neither a bucket nor the bytes that a rank sends in a
    round exceed `bucket_bytes`, unless a single row does (if quantised, a row of blocks); such a row is sent alone.
    Without `verify` all checksums are 0.
    """
    exchange = _Exchange(sources, dtype, allocate, group, verify=verify)
    rounds = plan.rounds(bucket_bytes, dtype.itemsize)
    flying: deque[_Flight] = deque()
    for index in range(len(rounds)):
        flying.append(exchange.start(index, rounds.of(index, exchange.rank)))
        if len(flying) == NUM_FLYING:
            yield exchange.finish(flying.popleft())
    while flying:
        yield exchange.finish(flying.popleft())


@dataclass
class _Flight:
    """A round that has started: its slices from other ranks may still be on the way."""

    index: int
    values: Tensor  # the bucket
    transfers: list[Transfer]  # slices of the bucket, in its order
    num_bytes_received: int
    sums: Tensor  # checksums of the slices, [len(transfers)] int64
    works: list[dist.Work]


class _Exchange:
    """The exchange of this rank with the others, round by round.

    A rank sends to and receives from only the ranks that share slices with it. So ranks do not wait for the slowest
    rank in every round, but only for the ranks that send to them.
    """

    def __init__(
        self,
        sources: Mapping[str, Tensor],
        dtype: torch.dtype,
        allocate: Callable[[int, int], Tensor],
        group: dist.ProcessGroup | None,
        *,
        verify: bool,
    ) -> None:
        self.rank = dist.get_rank(group)
        self._sources, self._dtype, self._allocate, self._group, self._verify = sources, dtype, allocate, group, verify
        # Reused, because on a CPU fresh memory costs more than the copy.
        self._outgoing = [torch.empty(0, dtype=torch.uint8)] * NUM_FLYING
        self._sums: dict[tuple[str, Index, Index], Tensor] = {}  # by slice, because several ranks may need the same

    def start(self, index: int, transfers: list[Transfer]) -> _Flight:
        """Start this rank's transfers of a round. The bucket starts with the slices from other ranks, in rank order."""
        rank = self.rank
        kept = [t for t in transfers if t.source_rank == t.target_rank]
        sent = sorted((t for t in transfers if t.target_rank != rank), key=lambda t: t.target_rank)
        received = sorted((t for t in transfers if t.source_rank != rank), key=lambda t: t.source_rank)
        num_sent, num_received, num_kept = (sum(map(self._num_bytes, some)) for some in (sent, received, kept))
        values = self._allocate(index, num_received + num_kept)
        outgoing = self._outgoing[index % NUM_FLYING]
        if outgoing.numel() < num_sent or outgoing.device != values.device:
            self._outgoing[index % NUM_FLYING] = outgoing = torch.empty(0)  # free the old buffer first
            self._outgoing[index % NUM_FLYING] = outgoing = torch.empty(
                num_sent, dtype=torch.uint8, device=values.device
            )
        sums = torch.zeros(len(received) + len(kept), dtype=torch.int64, device=values.device)
        sent_sums = self._pack(sent, outgoing)
        messages = [
            *self._messages(dist.isend, [t.target_rank for t in sent], sent, outgoing, sent_sums),
            *self._messages(dist.irecv, [t.source_rank for t in received], received, values, sums),
        ]
        if index == 0:  # NCCL requires that a group's first operation is collective
            dist.all_reduce(torch.zeros(1, device=values.device), group=self._group)
        works = dist.batch_isend_irecv(messages) if messages else []
        sums[len(received) :] = self._pack(kept, values[num_received:])  # while the messages are on their way
        return _Flight(index, values, [*received, *kept], num_received, sums, works)

    def finish(self, flight: _Flight) -> Bucket:
        """Wait for the slices of a round."""
        for work in flight.works:
            work.wait()
        # The only wait for the device in a round.
        sums = flight.sums.tolist() if self._verify else [0] * len(flight.transfers)
        entries, start = [], 0
        for t, value in zip(flight.transfers, sums, strict=True):
            entries.append(Entry(t.target, t.target_offset, t.box.shape, start, value, t.is_quantised, t.is_float32))
            start += self._num_bytes(t)
        return Bucket(flight.index, flight.values, tuple(entries), flight.num_bytes_received, self._dtype)

    def _messages(
        self, operation: Any, peers: list[int], transfers: list[Transfer], values: Tensor, sums: Tensor
    ) -> Iterator[dist.P2POp]:
        """Yield the messages to or from each peer: the bytes of its slices, then their checksums.

        `transfers` are sorted by peer. Their bytes are at the start of `values`, and their checksums at the start of
        `sums`.
        """
        first_byte = first = 0
        for peer, members in groupby(zip(peers, transfers, strict=True), key=lambda pair: pair[0]):
            sizes = [self._num_bytes(t) for _, t in members]
            # sent as bytes, because gloo does not support fp8
            parts = [values[first_byte : first_byte + sum(sizes)], sums[first : first + len(sizes)]]
            for part in parts if self._verify else parts[:1]:
                yield dist.P2POp(operation, part, group=self._group, group_peer=peer)
            first_byte, first = first_byte + sum(sizes), first + len(sizes)

    def _num_bytes(self, transfer: Transfer) -> int:
        return transfer.num_bytes(self._dtype.itemsize)

    def _pack(self, transfers: list[Transfer], buffer: Tensor) -> Tensor:
        """Copy the slices into the buffer, one after another. Return their checksums, [len(transfers)], on the same
        device.
        """
        sums, start, no_sum = [], 0, torch.zeros((), dtype=torch.int64, device=buffer.device)
        # bytes and checksum, for other ranks that need the same slice
        quantised: dict[tuple[str, Index, Index], tuple[Tensor, Tensor]] = {}
        for t in transfers:
            piece = subtensor(self._sources, t.source)[region(t.source_offset, t.box.shape)]
            place = buffer[start : start + self._num_bytes(t)]
            start += place.numel()
            if t.is_quantised:
                key = t.source, t.source_offset, t.box.shape
                if key in quantised:
                    place.copy_(quantised[key][0])
                else:  # FP8 values, followed by the scales of their blocks
                    values, scales = quantise(piece)
                    place[: values.numel()].copy_(values.view(-1).view(torch.uint8))
                    place[values.numel() :].copy_(scales.view(-1).view(torch.uint8))
                    quantised[key] = place, checksum(place) if self._verify else no_sum
                sums.append(quantised[key][1])
                continue
            dtype = torch.float32 if t.is_float32 else self._dtype
            piece = piece.to(dtype)
            key = t.source, t.source_offset, t.box.shape
            if self._verify and key not in self._sums:
                self._sums[key] = checksum(piece)
            if place.storage_offset() % dtype.itemsize:  # unaligned after quantised slices
                place.copy_(piece.contiguous().view(-1).view(torch.uint8))
            else:
                place.view(dtype).view(t.box.shape).copy_(piece)
            sums.append(self._sums[key] if self._verify else no_sum)
        return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=buffer.device)
