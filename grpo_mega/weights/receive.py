"""The receiving end of buckets: write entries to plain tensors, in FP8 blocks too, and verify them by checksum.

A bucket is bytes. An entry is elements of one dtype, or, if quantised, FP8 values followed by the scales of their
blocks. A target in FP8 stores both as they came, with the scales in the parameter `scales_name(target)`. Any other
target gets the dequantised numbers. Needs only torch, so an engine's process can import it.

FP8 in blocks of 128 x 128 has e4m3 values, and an fp32 scale per block that multiplies them back. This is the format of
DeepSeek-V3's weights (arXiv:2412.19437, section 3.3). SGLang's `quant_method: fp8` with `weight_block_size: [128, 128]`
reads it as `weight` and `weight_scale_inv` and dequantises with `value * scale` (its `block_quant_dequant`). The scale
is amax / 448, because 448 is e4m3's largest number, so a block's largest value uses the whole range. It is rounded like
Transformer Engine's block quantiser without powers of two (`compute_scale_from_amax`): factor = 448 / amax in fp32,
value = weight * factor, scale = 1 / factor. So a trainer whose blockwise recipe has fp32 scales (with
NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1; the default is powers of two) computes with exactly the weights that are served.

A block of zeros has factor 1. A block with a NaN or an infinity has a NaN as its scale, so it stays as broken as its
source. The factor is at most 2^126, reached below an amax of 5e-36. Otherwise the scale could be a denormal, and
kernels flush denormals to zero. The last block of rows or columns may be smaller. Blocks are independent: to quantise a
slice cut at multiples of 128 returns the same bytes as to cut the quantised tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_mega.weights.boxes import Index, region
from grpo_mega.weights.checksum import checksum
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


VALUES, SCALES = torch.float8_e4m3fn, torch.float32
LARGEST = 448.0  # largest number of e4m3
LARGEST_FACTOR = 2.0**126
# Float32 copies of this size fit a CPU's caches, or take 64 MiB on a GPU.
_ELEMENTS_AT_ONCE = {
    "cpu": 1 << 20,
    "cuda": 1 << 22,
}


@torch.no_grad()
def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 values [rows, cols] and float32 scales [ceil(rows / 128), ceil(cols / 128)] of `weight` [rows,
    cols].
    """
    rows, cols = weight.shape
    values = torch.empty((rows, cols), dtype=VALUES, device=weight.device)
    scales = torch.empty(num_blocks((rows, cols)), dtype=SCALES, device=weight.device)
    step = _rows_at_once(weight)
    for row in range(0, rows, step):
        blocks = _blocks(weight[row : row + step])
        amax = blocks.abs().amax(dim=3).amax(dim=1)
        # Not `LARGEST / amax`, because torch computes it as a product with the reciprocal.
        factor = torch.full_like(amax, LARGEST).div_(amax).clamp_(max=LARGEST_FACTOR)
        factor = torch.where((amax > 0) & amax.isfinite(), factor, 1.0)
        scaled = blocks.mul(factor[:, None, :, None]).to(VALUES)
        values[row : row + step] = scaled.view(len(factor) * BLOCK, -1)[: rows - row, :cols]
        scales[row // BLOCK : row // BLOCK + len(factor)] = torch.where(
            amax.isfinite(), factor.reciprocal_(), torch.nan
        )
    return values, scales


@torch.no_grad()
def dequantise(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [rows, cols] in `dtype`: each value times its block's scale, multiplied in float32."""
    rows, cols = values.shape
    weight = torch.empty((rows, cols), dtype=dtype, device=values.device)
    step = _rows_at_once(values)
    for row in range(0, rows, step):
        blocks = _blocks(values[row : row + step])
        scale = scales[row // BLOCK : row // BLOCK + len(blocks)]
        weight[row : row + step] = (blocks * scale[:, None, :, None]).view(len(blocks) * BLOCK, -1)[: rows - row, :cols]
    return weight


def _rows_at_once(tensor: Tensor) -> int:
    return BLOCK * max(1, _ELEMENTS_AT_ONCE[tensor.device.type] // (BLOCK * tensor.shape[1]))


def _blocks(part: Tensor) -> Tensor:
    """Return float32 [blocks of rows, 128, blocks of columns, 128]. Smaller last blocks are padded with zeros."""
    part = part.to(SCALES)
    rows, cols = part.shape
    if rows % BLOCK or cols % BLOCK:
        part = F.pad(part, (0, -cols % BLOCK, 0, -rows % BLOCK))
    return part.reshape(part.shape[0] // BLOCK, BLOCK, part.shape[1] // BLOCK, BLOCK)
