"""The run's report: one HTML file that stands alone, made from what a run leaves in its folder.

`write_report(run_dir)` reads the folder (also of a run under way, a broken one or one of an older version: the page says what
is missing) and writes RUN_DIR/report.html, whole or not at all. The page requests nothing over a network; the run's text is
data in it, never markup.
"""

from __future__ import annotations

from pathlib import Path

from grpo_mega.errors import ConfigError
from grpo_mega.observe.report.page import render
from grpo_mega.observe.report.read import is_run, read_run
from grpo_mega.paths import REPORT_FILE, write_atomically


def write_report(run_dir: Path, *, is_over: bool = False) -> Path:
    """Return the path of the page. `is_over`: the run is ending now, though it still holds its folder.

    Raises ConfigError if the folder is not a run's, or cannot be written.
    """
    if not is_run(run_dir):
        raise ConfigError(f"{run_dir} is not the folder of a run; name the run_dir of a run that has begun")
    path = run_dir / REPORT_FILE
    try:
        write_atomically(path, render(read_run(run_dir, is_over=is_over)).encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give it a folder that can be written") from None
    return path
