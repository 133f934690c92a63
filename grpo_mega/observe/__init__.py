"""Observing a run: timers, metrics, the log and its writers, progress bars, curves, the report."""

from grpo_mega.observe.progress import progress, track
from grpo_mega.observe.run_log import RunLog, open_run_log
from grpo_mega.observe.timers import Timers

__all__ = ["RunLog", "Timers", "open_run_log", "progress", "track"]
