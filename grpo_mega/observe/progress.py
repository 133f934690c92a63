"""Progress of anything that may take longer than 5 seconds: a bar on a terminal, else a plain line at most every 5 s.

`progress(total, description, enabled)` is a context that gives a Bar to advance; `track(iterable, ...)` wraps a loop.
For rank 0 alone: the others pass enabled=False. Bars may be nested, and printed lines appear above them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")

SECONDS_BETWEEN_LINES = 5.0


class Bar(Protocol):
    def advance(self, n: int = 1) -> None:
        """`n` more of the total are done."""


@contextmanager
def progress(total: int | None, description: str, enabled: bool = True) -> Iterator[Bar]:
    """Shows how much of `total` (None: unknown) is done, as told by `bar.advance()`."""
    console = get_console()
    if not enabled:
        yield _NoBar()
    elif not console.is_terminal:
        yield LineBar(total, description)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as display:
            yield _RichBar(display, total, description)


def track(iterable: Iterable[T], description: str, enabled: bool = True) -> Iterator[T]:
    """The items of `iterable`, with progress shown while they are worked on."""
    total = len(iterable) if isinstance(iterable, Sized) else None
    with progress(total, description, enabled) as bar:
        for item in iterable:
            yield item
            bar.advance()


class LineBar:
    """Prints `description: done/total (seconds)` at most once in SECONDS_BETWEEN_LINES; quick work prints nothing."""

    def __init__(
        self,
        total: int | None,
        description: str,
        write: Callable[[str], None] = lambda line: print(line, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = "" if total is None else f"/{total}"
        self._description = description
        self._write = write
        self._clock = clock
        self._done = 0
        self._began = self._written = clock()

    def advance(self, n: int = 1) -> None:
        self._done += n
        now = self._clock()
        if now - self._written >= SECONDS_BETWEEN_LINES:
            self._written = now
            self._write(f"{self._description}: {self._done}{self._total} ({now - self._began:.0f} s)")


class _RichBar:
    def __init__(self, display: Progress, total: int | None, description: str) -> None:
        self._display = display
        self._task = display.add_task(description, total=total)

    def advance(self, n: int = 1) -> None:
        self._display.advance(self._task, n)


class _NoBar:
    def advance(self, n: int = 1) -> None:
        pass
