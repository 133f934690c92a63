"""The receiving end of buckets: pieces to their places in plain tensors, and proof that they are there.

A bucket is bytes. A piece is elements of one dtype, or if it is quantised FP8 values and behind them the scales of their
blocks. Where the target is FP8 too, both are kept as they came, the scales in the parameter `scales_name(target)`; any other
target gets what they stand for. Needs torch alone, so that an engine's own process can use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_mega.weights.boxes import Index, region
from grpo_mega.weights.checksum import checksum
from grpo_mega.weights.fp8_blocks import SCALES, VALUES, dequantise
from grpo_mega.weights.spec import BLOCK, num_blocks


class Entry(NamedTuple):
    """The bytes of a bucket from `start`, as `shape`, belong at `offset` of the local tensor `target`."""

    target: str
    offset: Index
    shape: Index
    start: int
    checksum: int  # of this piece's bytes, as they left
    is_quantised: bool = False


@torch.no_grad()
def put(entries: Iterable[Entry], values: Tensor, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Copies the pieces of a bucket's bytes to their places. `dtype`: of what is not quantised."""
    for entry in entries:
        place = part_of(tensors, entry.target)[region(entry.offset, entry.shape)]
        if not entry.is_quantised:
            place.copy_(_read(values, entry.start, entry.shape, dtype))
            continue
        found, scales = _blocks(entry, values)
        if place.dtype == VALUES:
            place.copy_(found)
            _scales_of(entry, tensors).copy_(scales)
        else:
            place.copy_(dequantise(found, scales, place.dtype))


@torch.no_grad()
def differing(entries: Iterable[Entry], tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors with a piece, not quantised, whose checksum is not the one that came with it."""
    plain = [entry for entry in entries if not entry.is_quantised]
    return _unlike(plain, [checksum(part_of(tensors, e.target)[region(e.offset, e.shape)]) for e in plain])


@torch.no_grad()
def differing_blocks(entries: Iterable[Entry], values: Tensor, tensors: Mapping[str, Tensor]) -> list[str]:
    """The same of the quantised pieces of a bucket which `put` has just put to their places.

    Proven are values and scales where the target keeps them, else those of the bucket, which nobody keeps.
    """
    quantised, sums = [entry for entry in entries if entry.is_quantised], []
    for entry in quantised:
        place = part_of(tensors, entry.target)[region(entry.offset, entry.shape)]
        if place.dtype == VALUES:
            sums.append(checksum(torch.cat((_bytes_of(place), _bytes_of(_scales_of(entry, tensors))))))
        else:
            sums.append(checksum(values[entry.start : _end(entry)]))
    return _unlike(quantised, sums)


def part_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor of that name, or if there is none and the name is "parameter[3]", the fourth sub-tensor of that parameter."""
    if name in tensors:
        return tensors[name]
    parameter, _, number = name.partition("[")
    return tensors[parameter][int(number.removesuffix("]"))]


def scales_name(name: str) -> str:
    """SGLang's parameter with the scales of another, whose name may be "parameter[3]"."""
    parameter, bracket, number = name.partition("[")
    return f"{parameter}_scale_inv{bracket}{number}"


def _blocks(entry: Entry, values: Tensor) -> tuple[Tensor, Tensor]:
    found = _read(values, entry.start, entry.shape, VALUES)
    return found, _read(values, entry.start + math.prod(entry.shape), num_blocks(entry.shape), SCALES)


def _read(values: Tensor, start: int, shape: Index, dtype: torch.dtype) -> Tensor:
    """A view, or a copy where the bytes do not lie as the dtype wants them."""
    found = values[start : start + math.prod(shape) * dtype.itemsize]
    if found.storage_offset() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype).view(shape)


def _scales_of(entry: Entry, tensors: Mapping[str, Tensor]) -> Tensor:
    offset = tuple(start // BLOCK for start in entry.offset)
    return part_of(tensors, scales_name(entry.target))[region(offset, num_blocks(entry.shape))]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _end(entry: Entry) -> int:
    return entry.start + math.prod(entry.shape) + SCALES.itemsize * math.prod(num_blocks(entry.shape))


def _unlike(entries: list[Entry], sums: list[Tensor]) -> list[str]:
    if not entries:
        return []
    found = torch.stack(sums).tolist()  # waits for the device, once
    return list(dict.fromkeys(e.target for e, value in zip(entries, found, strict=True) if value != e.checksum))
