"""The log of a run. The log of rank 0 passes everything to its writers; the log of any other rank has no writers.

Metric names are path-like ("reward/mean", "seconds/update", "eval/score"). `step` is written as the caller passes it. The last
line of a step counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_mega.config import Config
from grpo_mega.console import get_console
from grpo_mega.observe.report.refresh import ReportWriter
from grpo_mega.observe.samples import Decode, SampleRows
from grpo_mega.observe.wandb_writer import WandbWriter
from grpo_mega.observe.writers import ConsoleWriter, JsonLinesWriter, Level, Writer
from grpo_mega.text import well_formed
from grpo_mega.types import Group, StepMetrics


class RunLog:
    def __init__(self, writers: Sequence[Writer] = (), samples_per_step: int = 0) -> None:
        self.writers, self._rows = list(writers), SampleRows(samples_per_step)

    def log_step(self, step: int, metrics: StepMetrics) -> None:
        for writer in self.writers:
            writer.write_step(step, metrics)

    def log_eval(self, step: int, metrics: StepMetrics) -> None:
        for writer in self.writers:
            writer.write_eval(step, metrics)

    def message(self, text: str, *, level: Level = "info") -> None:
        for writer in self.writers:
            writer.write_message(well_formed(text), level=level)

    def warn(self, text: str) -> None:
        """Log a message that a person should act on."""
        self.message(text, level="warning")

    def log_samples(self, step: int, groups: Sequence[Group], decode: Decode) -> None:
        """Log the first whole groups of the step, at least log.samples_per_step samples. `decode` turns token ids into text."""
        rows = self._rows.of(step, groups, decode) if self.writers else []
        for writer in self.writers if rows else ():
            writer.write_samples(rows)

    def log_loads(self, step: int, tokens: Sequence[Sequence[int]]) -> None:
        """Log the tokens per expert, by layer. Log nothing for a dense model."""
        for writer in self.writers if any(tokens) else ():
            writer.write_loads(step, tokens)

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def open_run_log(config: Config, rank: int) -> RunLog:
    """Open the log of this rank. Rank 0 creates config.run_dir and its files."""
    if rank != 0:
        return RunLog()
    console = ConsoleWriter(get_console(), config.steps)
    log = RunLog([console, JsonLinesWriter(config.run_dir)], config.log.samples_per_step)
    if config.log.wandb:
        log.writers.append(WandbWriter(config, log=console.write_message))
    # The report writer comes last: when it reads the files, the other writers have written and closed them.
    log.writers.append(ReportWriter(config.run_dir, config.log.report_interval, warn=log.warn))
    return log
