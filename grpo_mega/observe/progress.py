"""Progress of anything that may take longer than 5 seconds: a bar on a terminal, else a plain line at most every 5 s.

`progress(total, description, enabled)` is a context that gives a Bar to advance; `track(iterable, ...)` wraps a loop. Shown are
how much is done, the time left, and tokens a second where the work counts tokens.
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
    def advance(self, n: int = 1, tokens: int = 0) -> None:
        """`n` more of the total are done, with so many tokens in them."""


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
            TextColumn("{task.fields[rate]}"),
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
    """Prints `sampling: 40/256 (12 s, 65 s left, 3,400 tokens/s)` at most once in SECONDS_BETWEEN_LINES; quick work prints
    nothing."""

    def __init__(
        self,
        total: int | None,
        description: str,
        write: Callable[[str], None] = lambda line: print(line, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._description = description
        self._write = write
        self._clock = clock
        self._done = self._tokens = 0
        self._began = self._written = clock()

    def advance(self, n: int = 1, tokens: int = 0) -> None:
        self._done += n
        self._tokens += tokens
        now = self._clock()
        if now - self._written >= SECONDS_BETWEEN_LINES:
            self._written = now
            self._write(f"{self._description}: {self._told(now - self._began)}")

    def _told(self, seconds: float) -> str:
        parts = [f"{seconds:.0f} s"]
        if self._total is not None and 0 < self._done <= self._total:
            parts.append(f"{seconds * (self._total - self._done) / self._done:.0f} s left")
        if self._tokens:
            parts.append(_rate(self._tokens, seconds))
        return f"{self._done}{'' if self._total is None else f'/{self._total}'} ({', '.join(parts)})"


class _RichBar:
    def __init__(self, display: Progress, total: int | None, description: str) -> None:
        self._display = display
        self._task = display.add_task(description, total=total, rate="")
        self._tokens, self._began = 0, time.monotonic()

    def advance(self, n: int = 1, tokens: int = 0) -> None:
        self._tokens += tokens
        rate = _rate(self._tokens, time.monotonic() - self._began) if self._tokens else ""
        self._display.update(self._task, advance=n, rate=rate)


class _NoBar:
    def advance(self, n: int = 1, tokens: int = 0) -> None:
        pass


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-3):,.0f} tokens/s"
