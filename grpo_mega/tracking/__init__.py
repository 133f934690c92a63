"""Observe a run: timers, metrics, rules on them, the log and its writers, progress bars."""
