"""The header of a safetensors file, read without torch: names, dtypes and shapes of its tensors, and whether the file is whole.

Format: 8 bytes, the header's length N in little-endian; N bytes of JSON; then the tensors' bytes, whose offsets count from the
end of the header.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import WeightMappingError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
}


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # as the format writes it: "BF16"
    shape: tuple[int, ...]
    offset: int = 0  # of its first byte in the file


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file. Raises WeightMappingError if it is damaged, or is not their bytes end to end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _broken(path, f"its {size} bytes do not hold the header they announce")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_twins)
        header.pop("__metadata__", None)
        infos = {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        wrong = next((name for name, entry in header.items() if not _has_its_bytes(entry)), None)
        problem = _placement_problem(spans)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _broken(path, f"its header is damaged: {error!r}") from None
    if wrong is not None:
        raise _broken(path, f"its header gives {wrong} another size than its shape")
    if problem is not None:
        raise _broken(path, problem)
    whole = 8 + length + (spans[-1][1] if spans else 0)
    if size < whole:
        raise _broken(path, f"it is cut short: {size} bytes of {whole}")
    if size > whole:
        raise _broken(path, f"it has {size} bytes, but its header tells of {whole}")
    return infos


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands there twice")
    return found


def _placement_problem(spans: list[tuple[int, int, str]]) -> str | None:
    """Tell why tensors of (begin, end, name), in order, do not lie end to end from 0 on, as the format demands."""
    end, before = 0, "the header"
    for begin, stop, name in spans:
        if begin < end:
            return f"its header has {name} overlap {before}"
        if begin > end:
            return f"its header leaves a hole of {begin - end} bytes before {name}"
        end, before = stop, name
    return None


def _has_its_bytes(entry: dict[str, Any]) -> bool:
    begin, end = entry["data_offsets"]
    bits = ITEM_BITS.get(entry["dtype"])
    return bits is None or (end - begin) * 8 == math.prod(entry["shape"]) * bits


def _broken(path: Path, problem: str) -> WeightMappingError:
    return WeightMappingError(f"{path} cannot be read ({problem}); fetch the file again")
