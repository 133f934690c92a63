"""Text that every file, server and tokenizer accepts (a str without surrogates), and the terminal's filter.

UTF-8 cannot encode a lone surrogate, half of a character in UTF-16. A str gets one from an escape in JSON or YAML
("\\ud800"), from a decoder or from a file name.

In files of JSON lines, one object per line, only "\\n" ends a line. `str.splitlines` also splits at U+2028, U+2029 and
U+0085. These are escaped on writing, and are text on reading. A byte order mark is skipped on reading.

After `filter_output`, everything that this process prints, logs, warns of or raises passes through `printable`. Texts
of models, data and templates may contain escape sequences that recolour, rewrite or reprogram a terminal, and controls
that reverse a line. Styled output goes through `get_console`, a rich console that filters the text and writes its own
styles. The progress bars of libraries (tqdm) keep the two controls that redraw their lines.
"""

from __future__ import annotations

import difflib
import io
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

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
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each raw line with its object, or None. Raise OSError."""
    with path.open("rb") as lines:
        for line in lines:
            yield line, parse_json_line(line)


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSON lines file, and the number of broken lines, not counting a half-written last one."""
    if not path.is_file():
        return [], 0
    lines = list(read_json_lines(path))
    num_bad = sum(record is None and line.endswith(b"\n") for line, record in lines)
    return [record for _, record in lines if record is not None], num_bad


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


_BAR_START = re.compile("(?:\r|\n|\x1b\\[A)*")


class SafeStream:
    """A text stream that passes written text through `printable`. Everything else is delegated to the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def rich_proxied_file(self) -> TextIO:
        """The terminal's stream, for rich to write to."""
        stream = self._stream
        while (inner := getattr(stream, "rich_proxied_file", None)) is not None:
            stream = inner
        return stream

    def write(self, text: str) -> int:
        caller = sys._getframe().f_back  # None if the interpreter reports an error
        if caller is not None and str(caller.f_globals.get("__name__")).partition(".")[0] == "tqdm":
            start = _BAR_START.match(text)[0]  # type: ignore[index]  # it matches any text
            self._stream.write(start + printable(text.removeprefix(start)))
        else:
            self._stream.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def filter_output() -> None:
    """Filter this process's stdout and stderr. Text that the terminal cannot show is escaped, because it must not end a
    run.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, cast(TextIO, SafeStream(stream)))


@lru_cache(maxsize=1)
def get_console() -> Console:
    """Return the process's console for styled output and progress bars."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(self, *args: Any, **settings: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **settings):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return SafeConsole(markup=False, emoji=False, highlight=False)


def as_text(value: Any) -> str:
    """Return a value of the config as text."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
