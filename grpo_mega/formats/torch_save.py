"""The file of `torch.save` for one contiguous tensor, made and read by hand; needs no torch.

Megatron's distributed checkpoints keep each piece of a tensor as such a file within a file. It is a zip archive of stored
records, so where the tensor's bytes begin and how long the whole is are known before one of them is read: they can be
streamed to their place in any order. The CRC32 fields are filled in when the bytes have been read back.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from grpo_mega.formats.dtypes import FROM_STORAGE, ITEM_BYTES, STORAGE_NAMES
from grpo_mega.weights.boxes import Index

ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF  # sizes and offsets from here on need zip64
_LOCAL, _CENTRAL, _END, _END64, _LOCATOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"

ReadAt = Callable[[int, int], bytes]  # (offset, length) of the blob


@dataclass(frozen=True)
class Blob:
    """`prefix`, then `num_bytes` of the tensor, then `suffix`. The data's CRC32 stands at two places, zero as yet."""

    prefix: bytes
    num_bytes: int
    suffix: bytes
    crc_offsets: tuple[int, int]  # from the blob's beginning, 4 bytes each, little-endian

    @property
    def size(self) -> int:
        return len(self.prefix) + self.num_bytes + len(self.suffix)


@dataclass(frozen=True)
class FoundTensor:
    """The tensor of a blob: `data_offset` counts from the blob's beginning."""

    dtype: str
    shape: Index
    data_offset: int
    crc: int


@cache
def blob_of(dtype: str, shape: Index) -> Blob:
    """Return the blob of a contiguous tensor."""
    records = {
        "archive/data.pkl": _pickled(dtype, shape),
        "archive/byteorder": b"little",
        "archive/version": b"3\n",
    }
    prefix, central = b"", []
    for name, content in records.items():
        crc, offset = zlib.crc32(content), len(prefix)
        prefix += _local_header(name, len(content), crc, offset) + content
        central.append(_central_header(name, len(content), crc, offset))
    num_bytes, offset, name = prod(shape) * ITEM_BYTES[dtype], len(prefix), "archive/data/0"
    prefix += _local_header(name, num_bytes, 0, offset)
    directory = b"".join(central)
    last = len(directory)
    directory += _central_header(name, num_bytes, 0, offset)
    suffix = directory + _end_records(len(records) + 1, len(directory), len(prefix) + num_bytes)
    return Blob(prefix, num_bytes, suffix, (offset + 14, len(prefix) + num_bytes + last + 16))


def _pickled(dtype: str, shape: Index) -> bytes:
    """Return a pickle of `torch._utils._rebuild_tensor_v2(storage, 0, shape, stride, False, OrderedDict())`."""
    stride: list[int] = []
    step = 1
    for n in reversed(shape):
        stride.insert(0, step)
        step *= max(n, 1)

    def plain(value: Any) -> bytes:
        return pickle.dumps(value, 2)[2:-1]

    storage = b"(" + plain("storage") + f"ctorch\n{STORAGE_NAMES[dtype]}\n".encode() + plain("0") + plain("cpu")
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + plain(prod(shape))
        + b"tQK\x00"
        + plain(shape)
        + plain(tuple(stride))
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )


def _local_header(name: str, size: int, crc: int, offset: int) -> bytes:
    """Return a local header padded so that the record's bytes begin at a multiple of ALIGNMENT."""
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LIMIT else b""
    begin = offset + 30 + len(name) + len(extra) + 4
    extra += struct.pack("<HH", 0x4246, -begin % ALIGNMENT) + b"Z" * (-begin % ALIGNMENT)
    return _LOCAL + _common(size, crc) + struct.pack("<HH", len(name), len(extra)) + name.encode() + extra


def _central_header(name: str, size: int, crc: int, offset: int) -> bytes:
    sizes = struct.pack("<QQ", size, size) if size >= _LIMIT else b""
    place = struct.pack("<Q", offset) if offset >= _LIMIT else b""
    extra = struct.pack("<HH", 1, len(sizes + place)) + sizes + place if sizes or place else b""
    tail = struct.pack("<HHHHHII", len(name), len(extra), 0, 0, 0, 0, min(offset, _LIMIT))
    return _CENTRAL + struct.pack("<H", 45) + _common(size, crc) + tail + name.encode() + extra


def _common(size: int, crc: int) -> bytes:
    """Return version needed, flags (UTF-8), stored, no date, CRC32, both sizes."""
    return struct.pack("<HHHHHIII", 45, 0x800, 0, 0, 0, crc, min(size, _LIMIT), min(size, _LIMIT))


def _end_records(count: int, size: int, offset: int) -> bytes:
    end = _END + struct.pack("<HHHHIIH", 0, 0, count, count, size, min(offset, _LIMIT), 0)
    if offset < _LIMIT:
        return end
    big = _END64 + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, size, offset)
    return big + _LOCATOR + struct.pack("<IQI", 0, offset + size, 1) + end


def find_tensor(read: ReadAt, size: int) -> FoundTensor:
    """Find the tensor in a blob of `size` bytes from any saver. Raise ValueError if it holds none, or one with gaps."""
    records = _directory(read, size)
    [stem] = {name.rpartition("/data.pkl")[0] for name in records if name.endswith("/data.pkl")} or [""]
    pickled, data = records.get(f"{stem}/data.pkl"), records.get(f"{stem}/data/0")
    if pickled is None or data is None:
        raise ValueError("holds no tensor")
    text = read(_begin(read, pickled.offset), pickled.size)
    if pickled.crc and zlib.crc32(text) != pickled.crc:  # 0 where torch was set to save none
        raise ValueError("describes its tensor in bytes that do not have the CRC32 saved with them")
    dtype, shape = _unpickled(text)
    if data.size != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"holds {data.size} bytes for a tensor {list(shape)} of {dtype}")
    return FoundTensor(dtype, shape, _begin(read, data.offset), data.crc)


@dataclass(frozen=True)
class _Record:
    offset: int  # of its local header
    size: int
    crc: int


def _directory(read: ReadAt, size: int) -> dict[str, _Record]:
    end = read(size - 22, 22)
    if end[:4] != _END:
        raise ValueError("is no archive of torch.save")
    count, length, offset = struct.unpack("<HII", end[10:20])
    if offset == _LIMIT or count == 0xFFFF or length == _LIMIT:
        locator = read(size - 42, 20)
        big = read(struct.unpack("<Q", locator[8:16])[0], 56)
        count, length, offset = struct.unpack("<QQQ", big[32:56])
    directory = read(offset, length)
    records: dict[str, _Record] = {}
    at = 0
    for _ in range(count):
        crc, _, full, name_length, extra_length, comment = struct.unpack("<IIIHHH", directory[at + 16 : at + 34])
        place = struct.unpack("<I", directory[at + 42 : at + 46])[0]
        name = directory[at + 46 : at + 46 + name_length].decode()
        extra = directory[at + 46 + name_length : at + 46 + name_length + extra_length]
        full, place = _zip64(extra, full, place)
        records[name] = _Record(place, full, crc)
        at += 46 + name_length + extra_length + comment
    return records


def _zip64(extra: bytes, full: int, place: int) -> tuple[int, int]:
    while extra:
        kind, length = struct.unpack("<HH", extra[:4])
        if kind == 1:
            numbers = list(struct.unpack(f"<{length // 8}Q", extra[4 : 4 + length // 8 * 8]))
            if full == _LIMIT:
                full = numbers.pop(0)
                del numbers[:1]  # the compressed size
            if place == _LIMIT:
                place = numbers.pop(0)
        extra = extra[4 + length :]
    return full, place


def _begin(read: ReadAt, local: int) -> int:
    """Return the offset of the bytes of a record whose local header is at `local`."""
    name_length, extra_length = struct.unpack("<HH", read(local + 26, 4))
    return local + 30 + name_length + extra_length


@cache
def _unpickled(text: bytes) -> tuple[str, Index]:
    dtype, offset, shape, stride = _TensorUnpickler(io.BytesIO(text)).load()
    step = 1
    for n, its_step in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and its_step != step:
            raise ValueError(f"holds a tensor that is not contiguous (strides {list(stride)})")
        step *= max(n, 1)
    if offset:
        raise ValueError(f"holds a tensor that begins at element {offset} of its storage")
    return dtype, tuple(shape)


class _TensorUnpickler(pickle.Unpickler):
    """Loads (dtype, offset, shape, stride); refuses all names but those of a tensor."""

    def persistent_load(self, pid: Any) -> str:
        return FROM_STORAGE[pid[1]]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda dtype, offset, shape, stride, *rest: (dtype, offset, tuple(shape), tuple(stride))
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return lambda _, offset, shape, stride, grad, hooks, dtype, *rest: (dtype, offset, tuple(shape), tuple(stride))
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in FROM_STORAGE:
            return name
        raise ValueError(f"names {module}.{name}, which no saved tensor does")
