"""Observe a run: timers, metrics, the log and its writers, progress bars, curves, the report."""
