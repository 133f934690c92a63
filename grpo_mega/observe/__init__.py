"""What a run tells of itself: timers, the step log and its writers, progress bars, curves."""

from grpo_mega.observe.progress import progress, track
from grpo_mega.observe.run_log import NullRunLog, RunLog, open_run_log
from grpo_mega.observe.timers import Timers

__all__ = ["NullRunLog", "RunLog", "Timers", "open_run_log", "progress", "track"]
