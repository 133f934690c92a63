"""Keep a run's report up to date while it trains: a process at the lowest priority writes it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from grpo_mega.cli.report.report import write_report
from grpo_mega.paths import REPORT_FILE
from grpo_mega.tracking.writers import Writer
from grpo_mega.types import StepMetrics


class ReportWriter(Writer):
    def __init__(self, run_dir: Path, interval: int, warn: Callable[[str], None]) -> None:
        """`interval`: steps between pages; 0 writes a page only at the end."""
        self._run_dir, self._interval, self._warn = run_dir, interval, warn
        self._process: subprocess.Popen[str] | None = None
        self._has_warned = False

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        if self._process is not None and self._process.poll() is not None:
            process, self._process = self._process, None
            output, _ = process.communicate()
            if process.returncode:
                self._warn_once(output.strip().rpartition("grpo-mega: error: ")[2] or f"exit code {process.returncode}")
        if self._interval > 0 and step % self._interval == 0 and self._process is None:
            try:
                self._process = subprocess.Popen(
                    ["nice", "-n", "19", sys.executable, "-m", "grpo_mega.cli", "report", str(self._run_dir)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
            except OSError as error:
                self._warn_once(str(error))

    def write_eval(self, step: int, metrics: StepMetrics) -> None:
        pass  # the write_step call of this step follows

    def close(self) -> None:
        if self._process is not None:  # its page would be replaced immediately
            self._process.kill()
            self._process.communicate()
            for partial in self._run_dir.glob(f".{REPORT_FILE}.*"):
                partial.unlink(missing_ok=True)
        try:
            write_report(self._run_dir, is_over=True)
        except Exception as error:
            self._warn_once(str(error) or repr(error))

    def _warn_once(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            with contextlib.suppress(Exception):  # log files may already be closed
                self._warn(f"the run's report cannot be written ({' '.join(why.split())}); training continues")
