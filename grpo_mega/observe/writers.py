"""Writers of a run's log: the console, files of JSON lines, and the report. trackers.py has more writers.

Every writer accepts any subset of the known metrics. Files are appended to and flushed line by line, so they are
complete when a run is killed. A resumed run appends to the same files, and the last line of a step counts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console
from rich.text import Text

from grpo_mega.observe.report import write_report
from grpo_mega.paths import (
    EXPERTS_FILE,
    MESSAGES_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SAMPLES_FILE,
    write_atomically,
)
from grpo_mega.text import json_line
from grpo_mega.types import StepMetrics

LINE_WIDTH = 120  # maximum number of columns of a step line
SHORTEST_PHASE_SHOWN = 0.05  # phases below this many seconds are not shown
MAX_SHARE = 0.05  # maximum share of wall time that pages of the report may use

Level = Literal["info", "warning"]


class Writer:
    """Ignores everything. A subclass overrides only the methods for what it writes. An evaluation is written like a
    step.
    """

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        pass

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        self.write_step(step, metrics)

    def write_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write `rows` from samples.SampleRows, at least one."""

    def write_loads(self, step: int, tokens: Sequence[Sequence[int]]) -> None:
        """Write the tokens per expert, by layer. The list of a dense layer is empty."""

    def write_message(self, text: str, *, level: Level = "info") -> None:
        pass

    def close(self) -> None:
        pass


class ConsoleWriter(Writer):
    """Prints one line per step of at most 120 columns, styled on a terminal, plain elsewhere."""

    def __init__(self, console: Console, num_steps: int, seconds_between: float = 0.0) -> None:
        """Print a step only if it is the last one, or if `seconds_between` have passed since another one."""
        self._console, self._num_steps, self._seconds_between = console, num_steps, seconds_between
        self._shown_at = -seconds_between

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        if step < self._num_steps and time.monotonic() < self._shown_at + self._seconds_between:
            return
        self._shown_at = time.monotonic()
        head = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
        self._print(head, step_line(metrics, LINE_WIDTH - len(head) - 2), "bold")

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        values = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items())
        self._print(f"held-out, step {step}", values, "bold green")

    def write_message(self, text: str, *, level: Level = "info") -> None:
        self._console.print(Text(text, style="yellow" if level == "warning" else ""), soft_wrap=True)

    def _print(self, head: str, line: str, style: str) -> None:
        # soft_wrap: never fold a line, because a pipe or a log file has no width.
        self._console.print(Text.assemble((head, style), "  ", line), soft_wrap=True)


class JsonLinesWriter(Writer):
    """Appends to three files in the run's folder, and overwrites experts.json with the last step of an MoE model.

    metrics.jsonl    {"step": 3, "reward/mean": 0.5, ...}. NaN and infinities are strings, because JSON has no numbers
                     for them and null would hide the difference
    samples.jsonl    some responses of every step
    messages.jsonl   the console's messages, each with the last finished step
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = (METRICS_FILE, SAMPLES_FILE, MESSAGES_FILE)
        self._metrics, self._samples, self._messages = [(folder / name).open("a", encoding="utf-8") for name in names]
        self._step, self._experts = 0, folder / EXPERTS_FILE

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        self._step = step
        _append(self._metrics, [{"step": step, **metrics}])
        os.stat(self._metrics.name)  # raises if the folder was removed; writes to the open file would be lost

    def write_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        _append(self._samples, rows)

    def write_loads(self, step: int, tokens: Sequence[Sequence[int]]) -> None:
        write_atomically(self._experts, json_line({"step": step, "tokens": tokens}).encode())

    def write_message(self, text: str, *, level: Level = "info") -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        _append(self._messages, [{"step": self._step, "time": now, "level": level, "text": text}])

    def close(self) -> None:
        for file in (self._metrics, self._samples, self._messages):
            file.close()


class ReportWriter(Writer):
    def __init__(self, run_dir: Path, interval: int, warn: Callable[[str], None]) -> None:
        """`interval`: steps between pages; 0 writes a page only at the end."""
        self._run_dir, self._interval, self._warn = run_dir, interval, warn
        self._process: subprocess.Popen[str] | None = None
        self._began = self._not_before = time.monotonic()
        self._has_warned = False

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        if self._process is not None and self._process.poll() is not None:
            process, self._process = self._process, None
            output, _ = process.communicate()  # the CPU time that it used, or its error
            if process.returncode:
                self._warn_once(output.strip().rpartition("\n")[2] or f"exit code {process.returncode}")
            else:
                self._not_before = self._began + float(output.split()[-1]) / MAX_SHARE
        is_due = self._interval > 0 and step % self._interval == 0
        if is_due and self._process is None and time.monotonic() >= self._not_before:
            self._began = time.monotonic()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "grpo_mega.observe.report", str(self._run_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            except OSError as error:
                self._warn_once(str(error))

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        pass  # the write_step call of this step follows

    def close(self) -> None:
        if self._process is not None:  # its page would be replaced immediately
            self._process.kill()
            self._process.communicate()
            for partial in self._run_dir.glob(f".{REPORT_FILE}.*"):
                partial.unlink(missing_ok=True)
        try:
            write_report(self._run_dir, is_over=True)
        except Exception as error:
            self._warn_once(str(error) or repr(error))

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(Exception):  # log files may already be closed
                self._warn(f"the run's report cannot be written ({' '.join(why.split())}); training continues")


def _append(file: IO[str], rows: Sequence[Mapping[str, Any]]) -> None:
    file.writelines(json_line(row) for row in rows)
    file.flush()


def step_line(metrics: Mapping[str, float], width: int) -> str:
    """Return the main figures of a step in a line: `reward 0.812  kl 0.0123 ...  3.4 s: sample 1.2, update 0.8`.

    The longest phases come first, as many as fit into `width` columns.
    """
    watched = [
        ("reward", "reward/mean", "{:.3f}".format),
        ("loss", "loss/nll", "{:.4f}".format),
        ("kl", "kl/mean", "{:.4f}".format),
        ("length", "response_length/mean", _three_digits),
        ("cut", "response_length/cut", "{:.0%}".format),
        ("turns", "agent/turns", "{:.1f}".format),
        ("clip", "clip/fraction", "{:.3f}".format),
        ("mismatch", "mismatch/abs_mean", "{:.0e}".format),
    ]
    parts = [f"{label} {show(metrics[name])}" for label, name, show in watched if name in metrics]
    phases = {name.removeprefix("seconds/"): value for name, value in metrics.items() if name.startswith("seconds/")}
    total = phases.pop("step", None)
    if total is None:
        return "  ".join(parts)
    line = "  ".join([*parts, f"{_three_digits(total)} s"])
    separator = ": "
    for phase in sorted(phases, key=lambda phase: -phases[phase]):
        shown = f"{separator}{phase} {_three_digits(phases[phase])}"
        if phases[phase] < SHORTEST_PHASE_SHOWN or len(line) + len(shown) > width:
            break
        line += shown
        separator = ", "
    return line


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"
