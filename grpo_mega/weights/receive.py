"""The receiving end of buckets: write entries to plain tensors, and verify them there by checksum.

A bucket is bytes. An entry is elements of one dtype, or, if quantised, FP8 values followed by the scales of their
blocks. A target in FP8 stores both as they came, with the scales in the parameter `scales_name(target)`. Any other
target gets the dequantised numbers. Needs only torch, so an engine's process can import it.
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
    """Bytes of a bucket from `start` on, as `shape`, that belong at `offset` of the local tensor `target`."""

    target: str
    offset: Index
    shape: Index
    start: int
    checksum: int  # checksum of this entry's bytes at the source
    is_quantised: bool = False
    is_float32: bool = False  # float32 for any dtype of the other entries


@torch.no_grad()
def write_entries(entries: Iterable[Entry], values: Tensor, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Copy the entries of a bucket to their places. `dtype`: dtype of all entries that are neither quantised nor
    float32.
    """
    for entry in entries:
        place = subtensor(tensors, entry.target)[region(entry.offset, entry.shape)]
        if not entry.is_quantised:
            place.copy_(_read(values, entry.start, entry.shape, torch.float32 if entry.is_float32 else dtype))
            continue
        quantised = _read(values, entry.start, entry.shape, VALUES)
        scales = _read(values, entry.start + math.prod(entry.shape), num_blocks(entry.shape), SCALES)
        if place.dtype == VALUES:
            place.copy_(quantised)
            _scales_of(entry, tensors).copy_(scales)
        else:
            place.copy_(dequantise(quantised, scales, place.dtype))


@torch.no_grad()
def mismatched_tensors(entries: Iterable[Entry], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with an entry that is not quantised and whose checksum differs from the sender's."""
    plain = [entry for entry in entries if not entry.is_quantised]
    return _unlike(plain, [checksum(subtensor(tensors, e.target)[region(e.offset, e.shape)]) for e in plain])


@torch.no_grad()
def mismatched_blocks(entries: Iterable[Entry], values: Tensor, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors with a quantised entry, just written by `write_entries`, whose checksum differs.

    Verify values and scales in the target if it stores them; else verify them in the bucket.
    """
    quantised, sums = [entry for entry in entries if entry.is_quantised], []
    for entry in quantised:
        place = subtensor(tensors, entry.target)[region(entry.offset, entry.shape)]
        if place.dtype == VALUES:
            sums.append(checksum(torch.cat((_bytes_of(place), _bytes_of(_scales_of(entry, tensors))))))
        else:
            num_bytes = math.prod(entry.shape) + SCALES.itemsize * math.prod(num_blocks(entry.shape))
            sums.append(checksum(values[entry.start : entry.start + num_bytes]))
    return _unlike(quantised, sums)


def subtensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor of this name. If it does not exist and the name is "parameter[3]", return the fourth
    sub-tensor.
    """
    if name in tensors:
        return tensors[name]
    parameter, _, number = name.partition("[")
    return tensors[parameter][int(number.removesuffix("]"))]


def scales_name(name: str) -> str:
    """Return the name of SGLang's parameter with the scales of another one. The name may be "parameter[3]"."""
    parameter, bracket, number = name.partition("[")
    return f"{parameter}_scale_inv{bracket}{number}"


def _read(values: Tensor, start: int, shape: Index, dtype: torch.dtype) -> Tensor:
    """Return a view, or a copy if the bytes are not aligned for the dtype."""
    data = values[start : start + math.prod(shape) * dtype.itemsize]
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(shape)


def _scales_of(entry: Entry, tensors: Mapping[str, Tensor]) -> Tensor:
    offset = tuple(start // BLOCK for start in entry.offset)
    return subtensor(tensors, scales_name(entry.target))[region(offset, num_blocks(entry.shape))]


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _unlike(entries: list[Entry], sums: list[Tensor]) -> list[str]:
    if not entries:
        return []
    values = torch.stack(sums).tolist()  # the only wait for the device
    return list(dict.fromkeys(e.target for e, value in zip(entries, values, strict=True) if value != e.checksum))
