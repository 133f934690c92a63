"""The report of a run in progress: up to date, written in another process, without blocking training."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mega.cli.report.writer import ReportWriter
from tests.helpers.run_folders import make_run


def wait_for(writer: ReportWriter, step: int) -> None:
    """Wait until the writer's process has ended and the writer has noticed it."""
    assert writer._process is not None
    writer._process.wait(timeout=120)
    writer.write_step(step, {})


def test_a_page_is_written_at_every_interval_and_at_the_end(tmp_path: Path) -> None:
    run, told = make_run(tmp_path / "run", num_planned=20), []
    writer = ReportWriter(run, 2, told.append)
    writer.write_step(1, {})
    assert writer._process is None
    writer.write_step(2, {})
    wait_for(writer, 3)
    assert "not running here; step 12 of 20" in (run / "report.html").read_text()
    writer.write_step(4, {})
    first_process = writer._process
    writer.write_step(6, {})  # the previous page may still be in progress
    assert first_process is not None and writer._process is not None
    writer.close()
    assert "ended after step 12 of 20" in (run / "report.html").read_text() and told == []
    assert sorted(p.name for p in run.iterdir() if "report" in p.name) == ["report.html"]


@pytest.mark.parametrize("interval", [0, 1])
def test_a_report_that_cannot_be_written_is_one_warning(tmp_path: Path, interval: int) -> None:
    told: list[str] = []
    writer = ReportWriter(tmp_path / "gone", interval, told.append)
    writer.write_step(1, {})
    if interval:
        wait_for(writer, 2)
    writer.close()
    (said,) = told
    assert said.startswith("the run's report cannot be written (") and said.endswith("); training continues")
    assert f"({tmp_path}/gone" in said


def test_a_warning_that_cannot_be_printed_is_harmless(tmp_path: Path) -> None:
    def fail(text: str) -> None:
        raise ValueError("I/O operation on closed file")

    ReportWriter(tmp_path / "gone", 0, fail).close()
