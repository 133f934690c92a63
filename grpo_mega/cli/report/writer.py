"""Keep a run's report up to date while it trains."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from grpo_mega.cli.report.report import write_report
from grpo_mega.observe.writers import Writer
from grpo_mega.paths import REPORT_FILE
from grpo_mega.types import StepMetrics

MAX_SHARE = 0.05  # maximum share of wall time that pages of the report may use


class ReportWriter(Writer):
    def __init__(self, run_dir: Path, interval: int, warn: Callable[[str], None]) -> None:
        """`interval`: steps between pages; 0 writes a page only at the end."""
        self._run_dir, self._interval, self._warn = run_dir, interval, warn
        self._process: subprocess.Popen[str] | None = None
        self._began = self._not_before = time.monotonic()
        self._has_warned = False

    def write_step(self, step: int, metrics: StepMetrics) -> None:
        if self._process is not None and self._process.poll() is not None:
            process, self._process = self._process, None
            output, _ = process.communicate()  # the CPU time that it used, or its error
            if process.returncode:
                self._warn_once(output.strip().rpartition("\n")[2] or f"exit code {process.returncode}")
            else:
                self._not_before = self._began + float(output.split()[-1]) / MAX_SHARE
        is_due = self._interval > 0 and step % self._interval == 0
        if is_due and self._process is None and time.monotonic() >= self._not_before:
            self._began = time.monotonic()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "grpo_mega.cli.report.report", str(self._run_dir)],
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
