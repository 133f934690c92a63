"""Files of JSON lines: one object per line, in UTF-8.

Only "\\n" ends a line. `str.splitlines` also splits at U+2028, U+2029 and U+0085. These are escaped on writing, and are text on
reading. A byte order mark is skipped on reading.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_mega.text import well_formed

_OTHER_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")


def json_line(record: Mapping[str, Any]) -> str:
    """Return the line of an object.

    Not-a-number and infinities become the strings "NaN", "Infinity" and "-Infinity", because Python's float() reads them. Lone
    surrogates become U+FFFD.
    """
    text = well_formed(json.dumps(_finite(record), allow_nan=False, ensure_ascii=False))
    return _OTHER_LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if it has none, such as a half-written last line."""
    try:
        record = json.loads(line, parse_constant=str)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each raw line with its object, or None. Raise OSError."""
    with path.open("rb") as lines:
        for line in lines:
            yield line, parse_json_line(line)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
