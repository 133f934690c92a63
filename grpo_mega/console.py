"""Filter all output to the terminal in one place.

After `install`, everything that this process prints, logs, warns of or raises passes through `text.printable`. Texts of
models, data and templates may contain escape sequences that recolour, rewrite or reprogram a terminal, and controls
that reverse a line. Styled output goes through `get_console`, a rich console that filters the text and writes its own
styles. The progress bars of libraries (tqdm) keep the two controls that redraw their lines.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TextIO, cast

from grpo_mega.text import printable

if TYPE_CHECKING:
    from rich.console import Console

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
