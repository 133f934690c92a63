"""Progress of anything that may take longer than 2 seconds, and seconds and peak memory by phase.

Progress is a bar on a terminal, else a plain line at most every 5 s.

`progress(total, description, enabled)` is a context manager that yields a Bar to advance, in items, bytes or seconds.
It shows the amount done, the time left, and bytes or tokens per second. `phase` does the same for work that happens
once, such as a part of the start, and prints its first line after a second. `Pace` estimates the time left of work of
several kinds. Only rank 0 shows progress: other ranks pass enabled=False. Bars may be nested, threads may share one,
and printed lines appear above them.

Timers measure phases: `with timers("sample"):` around a phase, `timers.lap()` once per step. All time is charged to
exactly one phase: the innermost open one, or "other". So the phases of a lap sum to its wall time, even if they are
nested, and "other" shows the time outside all phases. Peaks are charged in the same way.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from grpo_mega.text import filter_output, get_console
from grpo_mega.types import StepMetrics

if TYPE_CHECKING:
    from rich.progress import Progress


Unit = Literal["items", "bytes", "seconds"]
SECONDS_BETWEEN_LINES = 5.0
SECONDS_OF_SILENCE = 1.0  # a phase that takes longer prints its description


@contextmanager
def progress(total: int | None, description: str, enabled: bool = True, unit: Unit = "items") -> Iterator[Bar]:
    """Show how much of `total` (None: unknown) is done, as counted by `bar.advance()`."""
    console = get_console()
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
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TransferSpeedColumn,
        )

        if total is None or unit == "seconds":
            done: tuple[Any, ...] = (TimeElapsedColumn(),)
        elif unit == "bytes":
            done = (TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn())
        else:
            done = (MofNCompleteColumn(), TimeElapsedColumn())
        texts = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("left", "rate")]
        columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), *done, *texts)
        with Progress(*columns, console=console, transient=True) as display:
            filter_output()  # rich replaces stdout and stderr until the bar is gone
            yield _TerminalBar(display, total, description, unit)


@contextmanager
def phase(description: str, enabled: bool = True, total: int | None = None, unit: Unit = "items") -> Iterator[Bar]:
    """Show work that happens once and may take long. Without a terminal, its first line is its description."""
    # One write with the end of the line: other threads print, too.
    silence = threading.Timer(SECONDS_OF_SILENCE, print, [f"{description}\n"], {"end": "", "flush": True})
    silence.daemon = True
    if enabled and not get_console().is_terminal:
        silence.start()
    try:
        with progress(total, description, enabled, unit) as bar:
            yield bar
    finally:
        silence.cancel()


class Bar:
    """Prints a line at most once in SECONDS_BETWEEN_LINES, so quick work prints nothing.

    A line is `sampling: 40/256 (12 s, 65 s left, 3,400 tokens/s)`, `writing: 35%, 1.2 of 3.4 GB, 567 MB/s, 4 s left`,
    or `waiting for the server: 12 s of at most 600 s`.
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

    def advance(self, n: int = 1, tokens: int = 0, left: str | None = None) -> None:
        """Count `n` more items, bytes or seconds as done, with `tokens` tokens in them.

        `left` is a text like "65 s left". If it is None, the rest is expected to take as long as the part that is done.
        """
        with self._lock:
            self._done += n
            self._tokens += tokens
            self._show(left)

    def _show(self, left: str | None) -> None:
        now = self._clock()
        if now - self._written >= SECONDS_BETWEEN_LINES:
            self._written = now
            seconds = now - self._began
            left = left if left is not None else self._left(seconds)
            if self._unit == "seconds":
                text = f"{seconds:.0f} s of at most {self._total} s"
            elif self._unit == "bytes":
                total, speed = self._total or 0, f"{self._done / seconds / 1e6:.0f} MB/s"
                share = f"{self._done / max(1, total):.0%}, {self._done / 1e9:.1f} of {total / 1e9:.1f} GB"
                text = ", ".join(filter(None, [share, speed, left]))
            else:
                parts = [f"{seconds:.0f} s", left, _rate(self._tokens, seconds) if self._tokens else ""]
                of_total = "" if self._total is None else f"/{self._total}"
                text = f"{self._done}{of_total} ({', '.join(filter(None, parts))})"
            self._write(f"{self._description}: {text}")

    def _left(self, seconds: float) -> str:
        """Return the time left if it grows with the amount left; "" if it is not known or a wait may end at any
        time.
        """
        if self._total is None or self._unit == "seconds" or not 0 < self._done <= self._total:
            return ""
        return f"{seconds * (self._total - self._done) / self._done:.0f} s left"


class _TerminalBar(Bar):
    def __init__(self, display: Progress, total: int | None, description: str, unit: Unit) -> None:
        super().__init__(total, description, unit)
        self._display = display
        self._first_left = f"of at most {total} s" if unit == "seconds" else ""
        self._task = display.add_task(description, total=total, rate="", left=self._first_left)

    def _show(self, left: str | None) -> None:
        seconds = self._clock() - self._began
        rate = _rate(self._tokens, seconds) if self._tokens else ""
        text = left if left is not None else self._left(seconds) or self._first_left
        self._display.update(self._task, completed=self._done, rate=rate, left=text)


class Pace:
    """Estimates the time left of work with pieces of several kinds, such as forward and backward passes.

    It measures the time between the starts of two pieces, and charges it to the first one. It remembers the mean time
    of each kind, so the second update of a run knows how long an optimizer step takes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = defaultdict[str, float](float)  # seconds of all finished pieces, by kind
        self._counts: Counter[str] = Counter()  # number of finished pieces, by kind
        self._todo: dict[str, int] = {}
        self._running: tuple[str, float] | None = None  # kind and start of the piece that is running

    @contextmanager
    def over(self, todo: Mapping[str, int], bar: Bar) -> Iterator[Callable[[str], None]]:
        """Yield a function that advances the bar: call it with the kind of each piece at the start of the piece.

        `todo` has the number of pieces by kind. Other kinds are ignored.
        """
        self._todo, self._running = dict(todo), None

        def start(kind: str) -> None:
            if kind in todo:
                num_finished = self._finish()
                bar.advance(num_finished, left=self._left())
                self._todo[kind] -= 1
                self._running = kind, self._clock()

        try:
            yield start
        finally:
            self._finish()

    def _finish(self) -> int:
        """Measure the running piece. Return the number of pieces that ended, 0 or 1."""
        if self._running is None:
            return 0
        kind, started_at = self._running
        self._seconds[kind] += self._clock() - started_at
        self._counts[kind] += 1
        self._running = None
        return 1

    def _left(self) -> str:
        todo = {kind: count for kind, count in self._todo.items() if count > 0}
        unknown = [kind for kind in todo if kind not in self._seconds]
        seconds = sum(count * self._seconds[k] / self._counts[k] for k, count in todo.items() if k in self._seconds)
        return " + ".join([f"{seconds:.0f} s", *unknown]) + " left"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / max(seconds, 1e-3):,.0f} tokens/s"


GIB = 2**30
_OTHER = "other"


class FreeMemory:
    """Records the lowest free memory of the device in each phase of a step, and the plan's figure for it.

    The driver's figure counts every process on the device, and NCCL's buffers. The phases are generation, asleep (both
    policy and engine are on the host), training and sync.
    """

    PHASES = ("generation", "asleep", "training", "sync")

    def __init__(self, read: Callable[[], int], smallest: Callable[[list[float]], list[float]]) -> None:
        """`read()` returns the free bytes now. `smallest` returns the minimum of each value over all ranks."""
        self.planned: Mapping[str, float] = {}  # GiB by phase
        self.lowest: dict[str, float] = {}  # GiB by phase, over all steps and ranks
        self._read, self._smallest = read, smallest
        self._step: dict[str, float] = {}

    def note(self, phase: str) -> None:
        assert phase in self.PHASES
        self._step[phase] = min(self._step.get(phase, math.inf), self._read() / GIB)

    def take(self) -> StepMetrics:
        """Return the metrics since the last call. All ranks call it together."""
        found = self._smallest([self._step.get(phase, math.inf) for phase in self.PHASES])
        self._step = {}
        metrics: StepMetrics = {}
        for phase, free in zip(self.PHASES, found, strict=True):
            if free < math.inf:
                metrics[f"memory/free_{phase}_gib"] = free
                self.lowest[phase] = min(self.lowest.get(phase, math.inf), free)
                if phase in self.planned:
                    metrics[f"memory/planned_free_{phase}_gib"] = self.planned[phase]
        return metrics

    def summary(self) -> str:
        """Return the lowest figures so far, each with the plan's."""
        parts = (
            f"{phase} {free:.1f}" + (f" (plan {self.planned[phase]:.1f})" if phase in self.planned else "")
            for phase, free in self.lowest.items()
        )
        return f"free memory of a GPU by phase, smallest over ranks, GiB: {', '.join(parts)}"


class Timers:
    """A stopwatch with named phases. The first lap starts at construction."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, take_peak: Callable[[], int] | None = None) -> None:
        """`take_peak()` returns the peak of bytes held since its last call. None: memory is not measured."""
        self._clock, self._take_peak = clock, take_peak
        self.peaks: dict[str, int] = {}  # maximum bytes over all laps, by phase
        # Context manager entered around every phase.
        self.watch: Callable[[str], AbstractContextManager[None]] | None = None
        self._lap_peaks: dict[str, int] = {}
        self._open: list[str] = [_OTHER]
        self._seconds = defaultdict[str, float](float)
        self._lap_began = self._mark = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._charge()
        self._open.append(phase)
        try:
            with self.watch(phase) if self.watch else nullcontext():
                yield
        finally:
            self._charge()
            self._open.pop()

    def current(self) -> tuple[str, float]:
        """Return the innermost open phase and the clock time when it started or resumed. Any thread may call it."""
        return self._open[-1], self._mark

    def lap(self) -> StepMetrics:
        """Return the metrics since the last lap, and start the next lap.

        The metrics are "seconds/<phase>", "seconds/other", "seconds/step" (their sum) and "memory/<phase>_gib".
        """
        self._charge()
        other = self._seconds.pop(_OTHER, 0.0)
        metrics = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items()}
        metrics |= {"seconds/other": other, "seconds/step": self._mark - self._lap_began}
        metrics |= {f"memory/{phase}_gib": peak / GIB for phase, peak in self._lap_peaks.items()}
        self._seconds.clear()
        self._lap_peaks.clear()
        self._lap_began = self._mark
        return metrics

    def _charge(self) -> None:
        now, phase = self._clock(), self._open[-1]
        self._seconds[phase] += now - self._mark
        self._mark = now
        if self._take_peak is not None:
            peak = self._take_peak()
            for peaks in (self._lap_peaks, self.peaks):
                peaks[phase] = max(peaks.get(phase, 0), peak)
