"""Carrying plans out: on one rank, and between the ranks of a process group.

`fill` reads a rank's tensors from a checkpoint. `buckets` moves weights between ranks in rounds and gives what arrived, round
by round, in buffers of at most `bucket_bytes`, so the extra memory is a few buckets whatever the model's size; `execute` puts
it into plain tensors. Elements are cast to the target's dtype before they are sent, and a piece that is to be proven comes with
the checksum that it had in the tensor it was taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.weights.boxes import Box, Holding, region
from grpo_mega.weights.checksum import checksum
from grpo_mega.weights.plan import Plan
from grpo_mega.weights.receive import Entry, part_of, put
from grpo_mega.weights.template import Template
from grpo_mega.weights.transfers import Transfer


@dataclass(frozen=True)
class Bucket:
    """What one round brought to this rank, complete when it is given."""

    index: int  # of the round
    values: Tensor  # 1-D
    entries: tuple[Entry, ...]
    num_bytes_received: int  # from other ranks; the rest comes from this one


@torch.no_grad()
def fill(holding: Holding, tensors: Mapping[str, Tensor], read: Callable[[Box], Tensor]) -> None:
    """Fills a rank's tensors with the slices that `read` gives; padding becomes zero."""
    for name, local in holding.items():
        if sum(p.box.size for p in local.pieces) < tensors[name].numel():
            tensors[name].zero_()
        for piece in local.pieces:
            tensors[name][region(piece.offset, piece.box.shape)].copy_(read(piece.box))


@torch.no_grad()
def execute(
    plan: Plan | Sequence[Transfer],
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 256 << 20,
) -> int:
    """Carries out this rank's part of a plan that all ranks of `group` share. Returns the bytes this rank received.

    `dtype` is that of all targets. Every rank calls this with the same plan; `sources` and `targets` are its own.
    """
    if not isinstance(plan, Plan):
        world_size = dist.get_world_size(group)
        plan = Plan((Template(tuple(plan)),), world_size, ranks_per_node=world_size)
    device = next((t.device for t in (*sources.values(), *targets.values())), torch.device("cpu"))

    def allocate(index: int, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, device=device)

    num_bytes = 0
    for bucket in buckets(plan, sources, dtype=dtype, bucket_bytes=bucket_bytes, allocate=allocate, group=group, prove=False):
        put(bucket.entries, bucket.values, targets)
        num_bytes += bucket.num_bytes_received
    return num_bytes


@torch.no_grad()
def buckets(
    plan: Plan,
    sources: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    bucket_bytes: int,
    allocate: Callable[[int, int], Tensor],
    group: dist.ProcessGroup | None = None,
    prove: bool = True,
) -> Iterator[Bucket]:
    """This rank's buckets, one a round. Every rank of `group` calls this with the same plan and takes all of its buckets.

    `allocate(round, num_elements)` gives the contiguous 1-D tensor of `dtype` that becomes a bucket's values; a bucket is not
    touched again once it is given. A rank that receives nothing in a round gets a bucket without entries. Neither a bucket nor
    what a rank sends in a round exceeds `bucket_bytes`, unless a single row does, which then goes alone. Without `prove` all
    checksums are 0.
    """
    rank, sending = dist.get_rank(group), _Sending(dtype)
    rounds = plan.rounds(bucket_bytes // dtype.itemsize)
    sum_of = checksum if prove else _nothing
    for index in range(len(rounds)):
        yield _exchange_round(index, rounds.of(index, rank), sources, sending, allocate, sum_of, group)


class _Sending:
    """The buffer of what a rank sends, kept from round to round: fresh memory costs a CPU more than the copy into it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._buffer: Tensor | None = None

    def take(self, num_elements: int, device: torch.device) -> Tensor:
        if self._buffer is None or self._buffer.numel() < num_elements:
            self._buffer = None  # before there is another
            self._buffer = torch.empty(num_elements, dtype=self.dtype, device=device)
        return self._buffer[:num_elements]


def _nothing(piece: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=piece.device)


def _exchange_round(
    index: int,
    transfers: list[Transfer],
    sources: Mapping[str, Tensor],
    sending: _Sending,
    allocate: Callable[[int, int], Tensor],
    sum_of: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup | None,
) -> Bucket:
    """One round, of which these are this rank's transfers. In the bucket lies first what others send, rank by rank."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    kept = [t for t in transfers if t.source_rank == t.target_rank]
    sent = sorted((t for t in transfers if t.target_rank != rank), key=lambda t: t.target_rank)
    received = sorted((t for t in transfers if t.source_rank != rank), key=lambda t: t.source_rank)
    num_received = sum(t.size for t in received)
    values = allocate(index, num_received + sum(t.size for t in kept))
    outgoing = sending.take(sum(t.size for t in sent), values.device)
    sent_sums = _pack(sent, sources, outgoing, sum_of)
    kept_sums = _pack(kept, sources, values[num_received:], sum_of)
    received_sums = sent_sums.new_empty(len(received))
    froms, tos = [t.source_rank for t in received], [t.target_rank for t in sent]
    sizes = _by_rank(froms, [t.size for t in received], world_size), _by_rank(tos, [t.size for t in sent], world_size)
    counts = _by_rank(froms, [1] * len(froms), world_size), _by_rank(tos, [1] * len(tos), world_size)
    _exchange(values[:num_received], outgoing, *sizes, group)
    _exchange(received_sums, sent_sums, *counts, group)
    sums = torch.cat((received_sums, kept_sums)).tolist()  # waits for the device, once a round
    return Bucket(index, values, _entries([*received, *kept], sums), num_received * values.itemsize)


def _pack(
    transfers: list[Transfer], sources: Mapping[str, Tensor], buffer: Tensor, sum_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Copies the slices into the buffer, one behind the other. Returns their checksums, [len(transfers)] on its device."""
    sums, start = [], 0
    for t in transfers:
        piece = part_of(sources, t.source)[region(t.source_offset, t.box.shape)].to(buffer.dtype)
        buffer[start : start + t.size].view(t.box.shape).copy_(piece)
        sums.append(sum_of(piece))
        start += t.size
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=buffer.device)


def _by_rank(ranks: list[int], sizes: list[int], world_size: int) -> list[int]:
    totals = [0] * world_size
    for rank, size in zip(ranks, sizes, strict=True):
        totals[rank] += size
    return totals


def _exchange(
    incoming: Tensor, outgoing: Tensor, incoming_sizes: list[int], outgoing_sizes: list[int], group: dist.ProcessGroup | None
) -> None:
    """Sizes count elements, by rank. Bytes travel, since gloo knows no fp8."""
    width = incoming.itemsize
    dist.all_to_all_single(
        incoming.view(torch.uint8),
        outgoing.view(torch.uint8),
        [n * width for n in incoming_sizes],
        [n * width for n in outgoing_sizes],
        group=group,
    )


def _entries(transfers: list[Transfer], sums: list[int]) -> tuple[Entry, ...]:
    entries, start = [], 0
    for t, value in zip(transfers, sums, strict=True):
        entries.append(Entry(t.target, t.target_offset, t.box.shape, start, value))
        start += t.size
    return tuple(entries)
