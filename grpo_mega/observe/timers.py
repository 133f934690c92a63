"""Seconds and peak memory by phase: `with timers("sample"):` around a phase, `timers.lap()` once per step.

All time is charged to exactly one phase: the innermost open one, or "other". So the phases of a lap sum to its wall
time, even if they are nested, and "other" shows the time outside all phases. Peaks are charged in the same way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from grpo_mega.types import StepMetrics

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
        self.watch: Callable[[str], AbstractContextManager[None]] | None = (
            None  # context manager entered around every phase
        )
        self._lap_peaks: dict[str, int] = {}
        self._open: list[str] = [_OTHER]
        self._seconds: dict[str, float] = {}
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
        self._seconds.setdefault(_OTHER, 0.0)
        metrics = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items() if phase != _OTHER}
        metrics["seconds/other"] = self._seconds[_OTHER]
        metrics["seconds/step"] = self._mark - self._lap_began
        metrics |= {f"memory/{phase}_gib": peak / GIB for phase, peak in self._lap_peaks.items()}
        self._seconds, self._lap_peaks = {}, {}
        self._lap_began = self._mark
        return metrics

    def _charge(self) -> None:
        now = self._clock()
        phase = self._open[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now
        if self._take_peak is not None:
            peak = self._take_peak()
            for peaks in (self._lap_peaks, self.peaks):
                peaks[phase] = max(peaks.get(phase, 0), peak)
