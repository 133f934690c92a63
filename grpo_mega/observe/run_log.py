"""The one front of a run's log: `open_run_log(config, rank)` gives rank 0 a RunLog and every other rank a NullRunLog.

Metric names are path-like ("reward/mean", "seconds/update", "eval/score"). `step` is written as the caller gives it; the last
line of a step counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rich import get_console

from grpo_mega.config import Config
from grpo_mega.observe.report.refresh import ReportWriter
from grpo_mega.observe.samples import Decode, SampleRows
from grpo_mega.observe.wandb_writer import WandbWriter
from grpo_mega.observe.writers import ConsoleWriter, JsonLinesWriter, Level, MessageWriter, SampleWriter, Writer
from grpo_mega.paths import MESSAGES_FILE, METRICS_FILE, SAMPLES_FILE
from grpo_mega.text import well_formed
from grpo_mega.types import Group, StepMetrics


class Log(Protocol):
    """What train.py sees, on any rank."""

    def log_step(self, step: int, metrics: StepMetrics) -> None: ...

    def log_eval(self, step: int, metrics: StepMetrics) -> None: ...

    def message(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode) -> None: ...

    def close(self) -> None: ...


def open_run_log(config: Config, rank: int) -> Log:
    """The log of this rank; rank 0 makes config.run_dir and its files."""
    if rank != 0:
        return NullRunLog()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    folder, log = config.run_dir, config.log
    console = ConsoleWriter(get_console(), config.steps)
    samples: list[SampleSink] = [SampleWriter(folder / SAMPLES_FILE)]
    writers: list[Writer] = [console, JsonLinesWriter(folder / METRICS_FILE), MessageWriter(folder / MESSAGES_FILE)]
    if log.wandb:
        wandb = WandbWriter(config, say=console.write_message)
        writers.append(wandb)
        samples.append(wandb)
    rows = SampleRows(log.samples_per_step)
    run_log = RunLog(writers, samples, rows)
    # The last one: when it reads the files, the others have written and closed them.
    writers.append(ReportWriter(folder, log.report_interval, warn=run_log.warn))
    return run_log


class SampleSink(Protocol):
    def write_samples(self, rows: Sequence[dict[str, Any]]) -> None: ...

    def close(self) -> None: ...


class RunLog:
    """Hands everything to every writer."""

    def __init__(self, writers: Sequence[Writer], sinks: Sequence[SampleSink], rows: SampleRows) -> None:
        self._writers, self._sinks, self._rows = writers, sinks, rows

    def log_step(self, step: int, metrics: StepMetrics) -> None:
        for writer in self._writers:
            writer.write_step(step, metrics)

    def log_eval(self, step: int, metrics: StepMetrics) -> None:
        for writer in self._writers:
            writer.write_eval(step, metrics)

    def message(self, text: str) -> None:
        self._say(text, "info")

    def warn(self, text: str) -> None:
        """A message that a person should act upon."""
        self._say(text, "warning")

    def _say(self, text: str, level: Level) -> None:
        for writer in self._writers:
            writer.write_message(well_formed(text), level=level)

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode) -> None:
        """Writes the step's first whole groups, log.samples_per_step samples or more; `decode` turns token ids into text."""
        rows = self._rows.of(step, groups, decode)
        for sink in self._sinks if rows else ():
            sink.write_samples(rows)

    def close(self) -> None:
        for sink in self._sinks:
            if sink not in self._writers:
                sink.close()
        for writer in self._writers:
            writer.close()


class NullRunLog:
    """The log of a rank that has none."""

    def log_step(self, step: int, metrics: StepMetrics) -> None:
        pass

    def log_eval(self, step: int, metrics: StepMetrics) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode) -> None:
        pass

    def close(self) -> None:
        pass
