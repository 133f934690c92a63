"""Write a run's report.html, and its curves as a picture, into its folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from grpo_mega.errors import ConfigError
from grpo_mega.observe.curves import draw_curves
from grpo_mega.observe.report import write_report
from grpo_mega.paths import CURVES_FILE, METRICS_FILE


def report(run_dir: Path) -> None:
    """Write the page, and the picture if at least one step was logged; print their paths."""
    print(write_report(run_dir))
    picture = run_dir / CURVES_FILE
    with contextlib.suppress(ConfigError):  # no step was logged, and the page says so
        draw_curves(run_dir / METRICS_FILE, picture)
        print(picture)
