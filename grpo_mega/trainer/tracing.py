"""Traces of chosen steps (`grpo-mega train --profile STEPS`), for Perfetto (ui.perfetto.dev) or chrome://tracing.

    RUN_DIR/trace/step-000003.json               the phases of all ranks, one process per rank
    RUN_DIR/trace/step-000003-rank-0.json        the operations of one rank by torch.profiler, with its phases
    RUN_DIR/trace/step-000003-rank-0.pickle      on GPUs: the rank's allocations, for pytorch.org/memory_viz

Times come from the clock of each node. Writing takes seconds; the next step shows them as the phase "trace".
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from grpo_mega.distributed.device import Device
from grpo_mega.tracking.progress import Timers
from grpo_mega.tracking.run_log import RunLog
from grpo_mega.trainer.saving import gather

MAX_ALLOCATIONS = 200_000  # maximum number of allocations in a memory snapshot

Span = tuple[str, int, int]  # (phase, start, end), times in nanoseconds since 1970


@dataclass(frozen=True)
class Tracer:
    """Traces the steps of log.profile. All ranks call `step` for every step."""

    steps: range
    folder: Path  # for the files
    rank: int
    device: Device
    timers: Timers
    log: RunLog
    ranks: dist.ProcessGroup | None = None  # the group of all ranks; None: the default group

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace the context if this step is to be traced. If the trace cannot be written, log a warning."""
        if step not in self.steps:
            yield
            return
        spans: list[Span] = []

        @contextmanager
        def watched(phase: str) -> Iterator[None]:
            phase_start = time.time_ns()
            try:
                with record_function(f"phase: {phase}"):
                    yield
            finally:
                spans.append((phase, phase_start, time.time_ns()))

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.device.is_cuda
        start = time.time_ns()
        with self._allocations(step), profile(activities=activities, acc_events=True) as profiler:
            self.timers.watch = watched
            try:
                yield
            finally:
                self.timers.watch = None
        spans.append((f"step {step}", start, time.time_ns()))
        with self.timers("trace"):
            everyone = gather((f"rank {self.rank} on {platform.node()}", spans), self.ranks)
            try:
                self.folder.mkdir(exist_ok=True)
                own = self._path(step, f"-rank-{self.rank}.json")
                profiler.export_chrome_trace(str(own))
                trace = json.loads(own.read_text())
                for event in trace["traceEvents"]:  # torch calls the process of every rank "python"
                    if (event.get("ph"), event.get("name"), event.get("pid")) == ("M", "process_name", os.getpid()):
                        event["args"]["name"] = f"rank {self.rank}"
                own.write_text(json.dumps(trace))
                if self.rank == 0:
                    path = self._path(step, ".json")
                    path.write_text(json.dumps(phase_trace(everyone)))
                    self.log.message(
                        f"trace of step {step} in {path}, with a trace of each rank's operations in the same folder"
                    )
            except OSError as error:
                self.log.warn(f"the trace of step {step} cannot be written ({error.strerror})")

    @contextmanager
    def _allocations(self, step: int) -> Iterator[None]:
        if not self.device.is_cuda:
            yield
            return
        self.folder.mkdir(exist_ok=True)
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        try:
            yield
            torch.cuda.memory._dump_snapshot(str(self._path(step, f"-rank-{self.rank}.pickle")))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _path(self, step: int, rest: str) -> Path:
        return self.folder / f"step-{step:06d}{rest}"


def phase_trace(everyone: list[tuple[str, list[Span]]]) -> dict[str, Any]:
    """Return Chrome's trace format for each rank's name and spans, with one process per rank.

    Times are relative to the first start.
    """
    origin = min((start for _, spans in everyone for _, start, _ in spans), default=0)
    events: list[dict[str, Any]] = []
    for rank, (name, spans) in enumerate(everyone):
        labels = {
            "process_name": {"name": name},
            "process_sort_index": {"sort_index": rank},
            "thread_name": {"name": "phases"},
        }
        events += ({"ph": "M", "pid": rank, "tid": 0, "name": label, "args": args} for label, args in labels.items())
        for phase, start, end in sorted(spans, key=lambda span: (span[1], -span[2])):
            times = {"ts": (start - origin) / 1000, "dur": (end - start) / 1000}  # microseconds
            events.append({"ph": "X", "pid": rank, "tid": 0, "cat": "phase", "name": phase, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
