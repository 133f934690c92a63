"""Progress in bytes: a bar with bytes/s and the time left on a terminal, else a plain line at most every 5 s."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich import get_console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from grpo_mega.observe.progress import SECONDS_BETWEEN_LINES


class ByteBar(Protocol):
    def advance(self, num_bytes: int) -> None:
        """So many more bytes are done. Threads may share a bar."""


@contextmanager
def byte_bar(total: int, description: str, enabled: bool = True) -> Iterator[ByteBar]:
    """Shows how much of `total` bytes is done; what was done before counts through an `advance` too."""
    console = get_console()
    if not enabled:
        yield _NoBar()
    elif not console.is_terminal:
        yield ByteLines(total, description)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as display:
            yield _RichBar(display, display.add_task(description, total=total))


class ByteLines:
    """Prints `description: 1.2 of 3.4 GB, 567 MB/s, 4 s left`; quick work prints nothing."""

    def __init__(self, total: int, description: str) -> None:
        self._total, self._description, self._done = total, description, 0
        self._began = self._written = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            now = time.monotonic()
            if now - self._written >= SECONDS_BETWEEN_LINES:
                self._written = now
                speed = max(1.0, self._done / (now - self._began))
                left = (self._total - self._done) / speed
                print(
                    f"{self._description}: {self._done / 1e9:.1f} of {self._total / 1e9:.1f} GB, "
                    f"{speed / 1e6:.0f} MB/s, {left:.0f} s left",
                    flush=True,
                )


class _RichBar:
    def __init__(self, display: Progress, task: int) -> None:
        self._display, self._task = display, task

    def advance(self, num_bytes: int) -> None:
        self._display.advance(self._task, num_bytes)  # type: ignore[arg-type]


class _NoBar:
    def advance(self, num_bytes: int) -> None:
        pass
