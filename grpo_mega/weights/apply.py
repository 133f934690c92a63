"""Load the shards of one rank, execute plans between the ranks of a process group, and write what arrives.

`load_shards` reads a rank's tensors from a checkpoint. `buckets` moves weights between ranks in rounds and yields the
received slices, round by round, in buffers of at most `bucket_bytes`, so the extra memory is a few buckets for any
model size. Ranks send slices to each other directly, and no round waits for all ranks. `execute` writes the slices into
plain tensors. Before they are sent, elements are cast to the target's dtype, or quantised if the plan says so. Each
slice may carry a checksum of the sent bytes.

`write_entries` is the receiving end, also in an engine's process. A bucket is bytes. An entry is elements of one dtype,
or, if quantised, FP8 values followed by the scales of their blocks. A target in FP8 stores both as they came, with the
scales in the parameter `scales_name(target)`. Any other target gets the dequantised numbers.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from grpo_mega.weights.boxes import Box, Index, RankShards, region
from grpo_mega.weights.checksum import checksum
from grpo_mega.weights.plan import TransferPlan
from grpo_mega.weights.spec import BLOCK, num_blocks
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
    exchange = _Exchange(sources, dtype, allocate, group, verify)
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


@dataclass
class _Exchange:
    """The exchange of this rank with the others, round by round.

    A rank sends to and receives from only the ranks that share slices with it. So ranks do not wait for the slowest
    rank in every round, but only for the ranks that send to them.
    """

    sources: Mapping[str, Tensor]
    dtype: torch.dtype
    allocate: Callable[[int, int], Tensor]
    group: dist.ProcessGroup | None
    verify: bool

    def __post_init__(self) -> None:
        self.rank = dist.get_rank(self.group)
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
        values = self.allocate(index, num_received + num_kept)
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
            dist.all_reduce(torch.zeros(1, device=values.device), group=self.group)
        works = dist.batch_isend_irecv(messages) if messages else []
        sums[len(received) :] = self._pack(kept, values[num_received:])  # while the messages are on their way
        return _Flight(index, values, [*received, *kept], num_received, sums, works)

    def finish(self, flight: _Flight) -> Bucket:
        """Wait for the slices of a round."""
        for work in flight.works:
            work.wait()
        # The only wait for the device in a round.
        sums = flight.sums.tolist() if self.verify else [0] * len(flight.transfers)
        entries, start = [], 0
        for t, value in zip(flight.transfers, sums, strict=True):
            entries.append(Entry(t.target, t.target_offset, t.box.shape, start, value, t.is_quantised, t.is_float32))
            start += self._num_bytes(t)
        return Bucket(flight.index, flight.values, tuple(entries), flight.num_bytes_received, self.dtype)

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
            for part in parts if self.verify else parts[:1]:
                yield dist.P2POp(operation, part, group=self.group, group_peer=peer)
            first_byte, first = first_byte + sum(sizes), first + len(sizes)

    def _num_bytes(self, transfer: Transfer) -> int:
        return transfer.num_bytes(self.dtype.itemsize)

    def _pack(self, transfers: list[Transfer], buffer: Tensor) -> Tensor:
        """Copy the slices into the buffer, one after another. Return their checksums, [len(transfers)], on the same
        device.
        """
        sums, start, no_sum = [], 0, torch.zeros((), dtype=torch.int64, device=buffer.device)
        # bytes and checksum, for other ranks that need the same slice
        quantised: dict[tuple[str, Index, Index], tuple[Tensor, Tensor]] = {}
        for t in transfers:
            piece = subtensor(self.sources, t.source)[region(t.source_offset, t.box.shape)]
            place = buffer[start : start + self._num_bytes(t)]
            start += place.numel()
            key = t.source, t.source_offset, t.box.shape
            if t.is_quantised:
                if key in quantised:
                    place.copy_(quantised[key][0])
                else:  # FP8 values, followed by the scales of their blocks
                    values, scales = quantise(piece)
                    place[: values.numel()].copy_(_bytes_of(values))
                    place[values.numel() :].copy_(_bytes_of(scales))
                    quantised[key] = place, checksum(place) if self.verify else no_sum
                sums.append(quantised[key][1])
                continue
            dtype = torch.float32 if t.is_float32 else self.dtype
            piece = piece.to(dtype)
            if self.verify and key not in self._sums:
                self._sums[key] = checksum(piece)
            if place.storage_offset() % dtype.itemsize:  # unaligned after quantised slices
                place.copy_(_bytes_of(piece))
            else:
                place.view(dtype).view(t.box.shape).copy_(piece)
            sums.append(self._sums[key] if self.verify else no_sum)
        return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=buffer.device)


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
