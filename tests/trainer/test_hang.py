"""A run with a stopped rank ends by itself, names the rank, and resumes from its last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.waiting]
SETTINGS = ("steps=1000", "checkpoint.interval=2", "hang_deadline_s=8", "log.progress=false")
SECONDS = 300


@pytest.mark.full
def test_a_run_with_a_stopped_rank_ends_with_a_report_and_resumes(tmp_path: Path) -> None:
    config, run_dir = kills.write_inputs(tmp_path, "tp=2"), tmp_path / "run"
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    process = kills.start(config, run_dir, settings)
    _wait_for(lambda: (run_dir / "checkpoints" / "latest").exists(), process)
    stopped = _rank(process.pid, 1)
    os.kill(stopped, signal.SIGSTOP)
    started_at = time.monotonic()
    assert process.wait(timeout=SECONDS) == 3
    assert time.monotonic() - started_at < 60
    report = (run_dir / "hang" / "report.txt").read_text()
    assert "reported by rank 0; the run ends here" in report and "rank 1: no answer: dead, stopped, or stuck" in report
    assert f"the last good checkpoint is {run_dir}/checkpoints/step-" in report
    assert report.strip() in kills.log_of(run_dir).read_text()
    assert not Path(f"/proc/{stopped}").exists()

    (run_dir / "stop").touch()
    again = kills.start(config, run_dir, [*settings, "--resume"])
    assert again.wait(timeout=SECONDS) == 0
    assert "resumed after step" in kills.log_of(run_dir).read_text()


@pytest.mark.full
def test_a_run_whose_checks_hang_one_after_another_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks hang on one rank, in total for longer than the deadline. The other rank waits."""
    (tmp_path / "hanging.py").write_text(
        "import os, time\n\ndef score(prompt, response, answer, extras):\n    time.sleep(60 * (os.environ['RANK'] =="
        " '0'))\n    return float(len(response))\n"
    )
    monkeypatch.chdir(tmp_path)
    config, run_dir = kills.write_inputs(tmp_path, "dp=2"), tmp_path / "run"
    settings = ["steps=1", "hang_deadline_s=5", "data.heldout=null", "checkpoint.interval=0", "log.progress=false"]
    settings += ["rewards={functions: [{name: hanging.score}], num_workers: 1, deadline_s: 1.5}"]
    process = kills.start(config, run_dir, [part for setting in settings for part in ("--set", setting)])
    assert process.wait(timeout=SECONDS) == 0, kills.log_of(run_dir).read_text()
    (step,) = [row for row in map(json.loads, (run_dir / "metrics.jsonl").open()) if "seconds/reward" in row]
    assert step["seconds/reward"] > 10


def _rank(launcher: int, number: int) -> int:
    """Return the process id of a rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"RANK={number}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"rank {number} is not among {children}")


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
