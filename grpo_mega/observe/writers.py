"""Where a run's log goes: the console, metrics.jsonl, samples.jsonl, messages.jsonl, and Weights & Biases.

Every writer takes (step, metrics) and may be given any subset of the known metrics. Files are appended to and flushed line
by line, so that a run that dies has told what it knew; a resumed run goes on in the same files, where the last line of a
step counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.text import Text

from grpo_mega.json_lines import json_line
from grpo_mega.types import StepMetrics

LINE_WIDTH = 120  # columns
SHORTEST_PHASE_SHOWN = 0.05  # seconds


Level = Literal["info", "warning"]


class Writer(Protocol):
    def write_step(self, step: int, metrics: StepMetrics) -> None: ...

    def write_eval(self, step: int, metrics: StepMetrics) -> None: ...

    def write_message(self, text: str, *, level: Level = "info") -> None: ...

    def close(self) -> None: ...


class ConsoleWriter:
    """One line a step, which fits 120 columns; styled on a terminal, plain elsewhere."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        head = f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"
        self._print(head, step_line(metrics, LINE_WIDTH - len(head) - 2), "bold")

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        values = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items())
        self._print(f"held-out, step {step}", values, "bold green")

    def write_message(self, text: str, *, level: Level = "info") -> None:
        self._console.print(Text(text, style="yellow" if level == "warning" else ""), soft_wrap=True)

    def close(self) -> None:
        pass

    def _print(self, head: str, line: str, style: str) -> None:
        # soft_wrap: a line is never folded at a width that a pipe or a log file does not have.
        self._console.print(Text.assemble((head, style), "  ", line), soft_wrap=True)


class JsonLinesWriter:
    """metrics.jsonl: {"step": 3, "reward/mean": 0.5, ...}. What is no finite number is a string: JSON has no numbers for these,
    and null would hide which it was."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        self._file.write(json_line({"step": step, **metrics}))
        self._file.flush()

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        self.write_step(step, metrics)

    def write_message(self, text: str, *, level: Level = "info") -> None:
        pass

    def close(self) -> None:
        self._file.close()


class SampleWriter:
    """samples.jsonl: a few responses of every step, as rows of samples.SampleRows."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write_samples(self, rows: Sequence[dict[str, Any]]) -> None:
        self._file.writelines(json_line(row) for row in rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MessageWriter:
    """messages.jsonl: what the console was told besides figures, each with the last step that was done by then."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._step = 0

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        self._step = step

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        self._step = step

    def write_message(self, text: str, *, level: Level = "info") -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(json_line({"step": self._step, "time": now, "level": level, "text": text}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def step_line(metrics: Mapping[str, float], width: int) -> str:
    """What a person watches of a step: `reward 0.812  kl 0.0123 ...  3.4 s: sample 1.2, update 0.8`.

    The longest phases come first, and as many of them as fit into `width` columns.
    """
    watched = [
        ("reward", "reward/mean", "{:.3f}".format),
        ("kl", "kl/mean", "{:.4f}".format),
        ("length", "response_length/mean", _three_digits),
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
