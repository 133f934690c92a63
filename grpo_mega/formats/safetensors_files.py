"""Read and write the headers of safetensors files without torch: names, dtypes, shapes and offsets of the tensors.

Format: 8 bytes with the header's length N in little-endian; N bytes of JSON; then the tensor bytes. Offsets count from the end
of the header.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dtypes import ITEM_BYTES
from grpo_mega.paths import check_regular

_MAX_HEADER_BYTES = 100_000_000  # limit of the format


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # safetensors name, such as "BF16"
    shape: tuple[int, ...]
    offset: int = 0  # offset of the first byte in the file


def read_headers(paths: Sequence[Path]) -> dict[str, tuple[Path, TensorInfo]]:
    """Return each tensor of several files with its file. Raise WeightMappingError."""
    tensors: dict[str, tuple[Path, TensorInfo]] = {}
    for path in paths:
        for name, info in read_header(path).items():
            if name in tensors:
                raise WeightMappingError(
                    f"{path} holds {name}, and so does {tensors[name][0].name}; fetch index and shards again"
                )
            tensors[name] = path, info
    return tensors


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file. Raise WeightMappingError if it is damaged or has bytes outside of tensors."""
    try:
        check_regular(path)
    except OSError as error:
        raise _broken(path, str(error.strerror)) from None
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _broken(path, f"its {size} bytes do not hold the header they announce")
        text = file.read(length)
    infos: dict[str, TensorInfo] = {}
    end, before = 0, "the header"
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: (*item[1]["data_offsets"], item[0])):
            start, stop = entry["data_offsets"]
            info = infos[name] = TensorInfo(entry["dtype"], tuple(entry["shape"]), 8 + length + start)
            num_bytes = prod(info.shape) * ITEM_BYTES[info.dtype] if info.dtype in ITEM_BYTES else stop - start
            if stop - start != num_bytes:
                raise _broken(path, f"its header gives {name} another size than its shape")
            if start < end:
                raise _broken(path, f"its header has {name} overlap {before}")
            if start > end:
                raise _broken(path, f"its header leaves a hole of {start - end} bytes before {name}")
            end, before = stop, name
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _broken(path, f"its header is damaged: {repr(error)[:200]}") from None
    whole = 8 + length + end
    if size < whole:
        raise _broken(path, f"it is cut short: {size} bytes of {whole}")
    if size > whole:
        raise _broken(path, f"it has {size} bytes, but its header describes {whole}")
    return infos


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int]]:
    """Return the header for (name, dtype, shape) in order, and the offset of each tensor in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, []
    for name, dtype, shape in tensors:
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offsets.append(offset)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + offset for offset in offsets]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name} occurs twice")
        entries[name] = value
    return entries


def _broken(path: Path, problem: str) -> WeightMappingError:
    return WeightMappingError(f"{path} cannot be read ({problem}); fetch the file again")
