"""Seconds by phase: `with timers("sample"):` around a phase, `timers.lap()` once a step.

Every moment is charged to exactly one phase: to the innermost one that is open, or to "other". So the phases of a lap sum
to its wall time, whatever is nested, and "other" shows what nobody measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_mega.types import StepMetrics

_OTHER = "other"


class Timers:
    """A stopwatch with named phases. The first lap begins when it is made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[str] = [_OTHER]
        self._seconds: dict[str, float] = {}
        self._lap_began = self._mark = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def lap(self) -> StepMetrics:
        """{"seconds/<phase>": ..., "seconds/other": ..., "seconds/step": their sum} since the last lap; begins the next."""
        self._charge()
        self._seconds.setdefault(_OTHER, 0.0)
        metrics = {f"seconds/{phase}": seconds for phase, seconds in self._seconds.items() if phase != _OTHER}
        metrics["seconds/other"] = self._seconds[_OTHER]
        metrics["seconds/step"] = self._mark - self._lap_began
        self._seconds = {}
        self._lap_began = self._mark
        return metrics

    def _charge(self) -> None:
        now = self._clock()
        phase = self._open[-1]
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now
