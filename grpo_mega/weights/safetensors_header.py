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
    """The tensors of a file. Raises WeightMappingError if it cannot be read, is damaged, or does not hold all their bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _broken(path, f"its {size} bytes do not hold the header they announce")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        infos = {
            name: TensorInfo(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
            for name, entry in header.items()
        }
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        wrong = next((name for name, entry in header.items() if not _has_its_bytes(entry)), None)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _broken(path, f"its header is damaged: {error!r}") from None
    if wrong is not None:
        raise _broken(path, f"its header gives {wrong} another size than its shape")
    if size < 8 + length + end:
        raise _broken(path, f"it is cut short: {size} bytes of {8 + length + end}")
    return infos


def _has_its_bytes(entry: dict[str, Any]) -> bool:
    begin, end = entry["data_offsets"]
    bits = ITEM_BITS.get(entry["dtype"])
    return bits is None or (end - begin) * 8 == math.prod(entry["shape"]) * bits


def _broken(path: Path, problem: str) -> WeightMappingError:
    return WeightMappingError(f"{path} cannot be read ({problem}); fetch the file again")
