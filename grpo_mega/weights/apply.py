"""Carrying plans out: on one rank, and between the ranks of a process group.

`fill` reads a rank's tensors from a checkpoint; `execute` moves weights between ranks in rounds whose buffers stay under
`bucket_bytes` a rank, so the extra memory is two buckets whatever the model's size. Elements are cast to the target's dtype
before they are sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.weights.boxes import Box, Holding, region
from grpo_mega.weights.plan import Transfer


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
    transfers: Sequence[Transfer],
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = 256 << 20,
) -> int:
    """Carries out this rank's part of a plan that all ranks of `group` share. Returns the bytes this rank received.

    `dtype` is that of all targets. Every rank calls this with the same transfers; `sources` and `targets` are its own.
    """
    rank = dist.get_rank(group)
    for t in transfers:
        if t.source_rank == t.target_rank == rank:
            _view(targets, t.target, t.target_offset, t).copy_(_view(sources, t.source, t.source_offset, t))
    remote = [t for t in transfers if t.source_rank != t.target_rank]
    return sum(_round(part, sources, targets, dtype, group) for part in _rounds(remote, bucket_bytes // dtype.itemsize))


def _round(
    transfers: list[Transfer],
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> int:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sends = sorted((t for t in transfers if t.source_rank == rank), key=lambda t: t.target_rank)
    receives = sorted((t for t in transfers if t.target_rank == rank), key=lambda t: t.source_rank)
    device = next((t.device for t in (*sources.values(), *targets.values())), torch.device("cpu"))
    parts = [_view(sources, t.source, t.source_offset, t).reshape(-1).to(dtype) for t in sends]
    outgoing = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
    incoming = torch.empty(sum(t.size for t in receives), dtype=dtype, device=device)
    send_sizes = [sum(t.size for t in sends if t.target_rank == r) for r in range(world_size)]
    receive_sizes = [sum(t.size for t in receives if t.source_rank == r) for r in range(world_size)]
    dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=group)
    chunks = incoming.split([t.size for t in receives])
    for t, chunk in zip(receives, chunks, strict=True):
        _view(targets, t.target, t.target_offset, t).copy_(chunk.view(t.box.shape))
    return incoming.nbytes


def _rounds(transfers: list[Transfer], capacity: int) -> list[list[Transfer]]:
    """Runs of transfers in which no rank sends or receives more than `capacity` elements (a larger one goes alone)."""
    rounds: list[list[Transfer]] = []
    used: dict[tuple[str, int], int] = defaultdict(int)
    for t in transfers:
        ends = (("out", t.source_rank), ("in", t.target_rank))
        if not rounds or any(used[end] + t.size > capacity for end in ends):
            rounds.append([])
            used.clear()
        rounds[-1].append(t)
        for end in ends:
            used[end] += t.size
    return rounds


def _view(tensors: Mapping[str, Tensor], name: str, offset: tuple[int, ...], t: Transfer) -> Tensor:
    return tensors[name][region(offset, t.box.shape)]
