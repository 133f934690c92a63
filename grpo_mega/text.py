"""Text that every file, server and tokenizer accepts (a str without surrogates), and text that a terminal may show.

UTF-8 cannot encode a lone surrogate, half of a character in UTF-16. A str gets one from an escape in JSON or YAML
("\\ud800"), from a decoder or from a file name.

In files of JSON lines, one object per line, only "\\n" ends a line. `str.splitlines` also splits at U+2028, U+2029 and
U+0085. These are escaped on writing, and are text on reading. A byte order mark is skipped on reading.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_OTHER_LINE_ENDS = re.compile("[\u0085\u2028\u2029]")

_SURROGATE = re.compile("[\ud800-\udfff]")
_COLOUR = re.compile("(?:\x1b\\[|\x9b)[0-9;:]*m")
_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def well_formed(text: str) -> str:
    """Return the text with U+FFFD instead of each surrogate. All other characters keep their positions."""
    return _SURROGATE.sub("\ufffd", text)


def find_surrogate(value: Any) -> str | None:
    """Return the first surrogate in a str or in nested lists and dicts, like "U+D800 at character 7"; None if there is
    none.
    """
    if isinstance(value, str):
        match = _SURROGATE.search(value)
        return match and f"U+{ord(match[0]):04X} at character {match.start()}"
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for item in items if (found := find_surrogate(item))), None)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return "did you mean X? " for the known name that is most similar; an empty text if none is similar."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {close[0]}? " if close else ""


def num_common(a: str, b: str) -> int:
    """Return the length of the longest common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def printable(text: str) -> str:
    """Return text that cannot control a terminal: controls are escaped as "\\x1b" or "\\u202e", and colours removed.

    Line feeds and tabs stay. All other controls (C0, C1, DEL) and line and paragraph separators are escaped. Controls
    of bidirectional text are escaped too, because they show a line in a different order.
    """
    return _CONTROL.sub(
        lambda match: match[0].encode("unicode_escape").decode(), _COLOUR.sub("", text.replace("\r\n", "\n"))
    )


def json_line(record: Mapping[str, Any]) -> str:
    """Return the line of an object.

    Not-a-number and infinities become the strings "NaN", "Infinity" and "-Infinity", because Python's float() reads
    them. Lone surrogates become U+FFFD.
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
