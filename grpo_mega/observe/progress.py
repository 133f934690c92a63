"""Progress of anything that may take longer than 5 seconds: a bar on a terminal, else a plain line at most every 5 s.

`progress(total, description, enabled)` is a context manager that yields a Bar to advance, in items or bytes. It shows
the amount done, the time left, and bytes or tokens per second. Only rank 0 shows progress: other ranks pass
enabled=False. Bars may be nested, threads may share one, and printed lines appear above them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from grpo_mega import console as consoles

if TYPE_CHECKING:
    from rich.progress import Progress

Unit = Literal["items", "bytes"]

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(total: int | None, description: str, enabled: bool = True, unit: Unit = "items") -> Iterator[Bar]:
    """Show how much of `total` (None: unknown) is done, as counted by `bar.advance()`."""
    console = consoles.get_console()
    if not enabled:
        yield Bar(total, description, unit, write=lambda line: None)
    elif not console.is_terminal:
        yield Bar(total, description, unit)
    else:
        from rich.progress import (  # slow to import, and only a terminal needs it
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        done = (
            (DownloadColumn(), TransferSpeedColumn())
            if unit == "bytes"
            else (MofNCompleteColumn(), TimeElapsedColumn())
        )
        rate = TextColumn("{task.fields[rate]}", markup=False)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            *done,
            TimeRemainingColumn(),
            rate,
        )
        with Progress(*columns, console=console, transient=True) as display:
            consoles.filter_output()  # rich replaces stdout and stderr until the bar is gone
            yield _TerminalBar(display, total, description)


class Bar:
    """Prints a line at most once in SECONDS_BETWEEN_LINES, so quick work prints nothing.

    A line is `sampling: 40/256 (12 s, 65 s left, 3,400 tokens/s)` or `writing: 1.2 of 3.4 GB, 567 MB/s, 4 s left`.
    """

    def __init__(
        self,
        total: int | None,
        description: str,
        unit: Unit = "items",
        write: Callable[[str], None] = lambda line: print(line, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._description, self._unit = total, description, unit
        self._write, self._clock = write, clock
        self._done = self._tokens = 0
        self._began = self._written = clock()
        self._lock = threading.Lock()

    def advance(self, n: int = 1, tokens: int = 0) -> None:
        """Count `n` more items or bytes as done, with `tokens` tokens in them."""
        with self._lock:
            self._done += n
            self._tokens += tokens
            self._show()

    def _show(self) -> None:
        now = self._clock()
        if now - self._written >= SECONDS_BETWEEN_LINES:
            self._written = now
            seconds = now - self._began
            self._write(
                f"{self._description}: {self._bytes(seconds) if self._unit == 'bytes' else self._items(seconds)}"
            )

    def _items(self, seconds: float) -> str:
        parts = [f"{seconds:.0f} s"]
        if self._total is not None and 0 < self._done <= self._total:
            parts.append(f"{seconds * (self._total - self._done) / self._done:.0f} s left")
        if self._tokens:
            parts.append(_rate(self._tokens, seconds))
        return f"{self._done}{'' if self._total is None else f'/{self._total}'} ({', '.join(parts)})"

    def _bytes(self, seconds: float) -> str:
        total, speed = self._total or 0, max(1.0, self._done / seconds)
        left = (total - self._done) / speed
        return f"{self._done / 1e9:.1f} of {total / 1e9:.1f} GB, {speed / 1e6:.0f} MB/s, {left:.0f} s left"


class _TerminalBar(Bar):
    def __init__(self, display: Progress, total: int | None, description: str) -> None:
        super().__init__(total, description)
        self._display, self._task = display, display.add_task(description, total=total, rate="")

    def _show(self) -> None:
        rate = _rate(self._tokens, self._clock() - self._began) if self._tokens else ""
        self._display.update(self._task, completed=self._done, rate=rate)


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-3):,.0f} tokens/s"
