"""The one front of a run's log: `open_run_log(config, rank)` gives rank 0 a RunLog and every other rank a NullRunLog.

Metric names are path-like ("reward/mean", "seconds/update", "eval/score"). `step` is written as the caller gives it; the last
line of a step counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rich import get_console

from grpo_mega.config import Config
from grpo_mega.observe.wandb_writer import WandbWriter
from grpo_mega.observe.writers import (
    METRICS_FILE,
    SAMPLES_FILE,
    ConsoleWriter,
    JsonLinesWriter,
    SampleWriter,
    Writer,
)
from grpo_mega.types import Group, StepMetrics

Decode = Callable[[list[int]], str]


class Log(Protocol):
    """What train.py sees, on any rank."""

    def log_step(self, step: int, metrics: StepMetrics) -> None: ...

    def log_eval(self, step: int, metrics: StepMetrics) -> None: ...

    def message(self, text: str) -> None: ...

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode) -> None: ...

    def close(self) -> None: ...


def open_run_log(config: Config, rank: int) -> Log:
    """The log of this rank; rank 0 makes config.run_dir and its files."""
    if rank != 0:
        return NullRunLog()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    console = ConsoleWriter(get_console(), config.steps)
    writers: list[Writer] = [console, JsonLinesWriter(config.run_dir / METRICS_FILE)]
    if config.log.wandb:
        writers.append(WandbWriter(config, say=console.write_message))
    samples = SampleWriter(config.run_dir / SAMPLES_FILE, config.log.samples_per_step)
    return RunLog(writers, samples)


class RunLog:
    """Hands everything to every writer."""

    def __init__(self, writers: Sequence[Writer], samples: SampleWriter) -> None:
        self._writers = writers
        self._samples = samples

    def log_step(self, step: int, metrics: StepMetrics) -> None:
        for writer in self._writers:
            writer.write_step(step, metrics)

    def log_eval(self, step: int, metrics: StepMetrics) -> None:
        for writer in self._writers:
            writer.write_eval(step, metrics)

    def message(self, text: str) -> None:
        for writer in self._writers:
            writer.write_message(text)

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode) -> None:
        """Writes log.samples_per_step of the step's samples to samples.jsonl; `decode` turns token ids into text."""
        self._samples.write(step, groups, decode)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self._samples.close()


class NullRunLog:
    """The log of a rank that has none."""

    def log_step(self, step: int, metrics: StepMetrics) -> None:
        pass

    def log_eval(self, step: int, metrics: StepMetrics) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode) -> None:
        pass

    def close(self) -> None:
        pass
