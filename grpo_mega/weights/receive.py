"""The receiving end of buckets: pieces to their places in plain tensors, and proof that they are there.

Needs torch alone, so that an engine's own process can use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_mega.weights.boxes import Index, region
from grpo_mega.weights.checksum import checksum


class Entry(NamedTuple):
    """`values[start : start + size]` of a bucket, as `shape`, belongs at `offset` of the local tensor `target`."""

    target: str
    offset: Index
    shape: Index
    start: int
    checksum: int  # of this piece, in the bucket's dtype, at its source


@torch.no_grad()
def put(entries: Iterable[Entry], values: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Copies the pieces of a bucket's `values` to their places."""
    for entry in entries:
        place = part_of(tensors, entry.target)[region(entry.offset, entry.shape)]
        place.copy_(values[entry.start : entry.start + place.numel()].view(entry.shape))


@torch.no_grad()
def differing(entries: Iterable[Entry], tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with a piece whose checksum is not the one that came with it."""
    entries = list(entries)
    if not entries:
        return []
    sums = torch.stack([checksum(part_of(tensors, e.target)[region(e.offset, e.shape)]) for e in entries])
    return list(dict.fromkeys(e.target for e, found in zip(entries, sums.tolist(), strict=True) if found != e.checksum))


def part_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor of that name, or if there is none and the name is "parameter[3]", the fourth sub-tensor of that parameter."""
    if name in tensors:
        return tensors[name]
    parameter, _, number = name.partition("[")
    return tensors[parameter][int(number.removesuffix("]"))]
