"""The report of a run in progress: up to date, written in another process, without blocking training."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_mega.cli.report import writer as report_writer
from grpo_mega.cli.report.writer import ReportWriter
from tests.helpers.run_folders import make_run


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Return the list of processes that write pages; it grows with each page."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    patched = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(report_writer, "subprocess", patched)
    return started


def test_a_page_is_written_at_every_interval_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: list[subprocess.Popen[str]]
) -> None:
    monkeypatch.setattr(report_writer, "MAX_SHARE", 1e9)
    run, told = make_run(tmp_path / "run", num_planned=20), []
    writer = ReportWriter(run, 2, told.append)
    writer.write_step(1, {})
    assert not pages
    writer.write_step(2, {})
    pages[0].wait(timeout=120)
    writer.write_step(3, {})
    assert len(pages) == 1 and "not running here; step 12 of 20" in (run / "report.html").read_text()
    writer.write_step(4, {})
    writer.write_step(6, {})  # the previous page may still be in progress
    assert len(pages) >= 2
    writer.close()
    assert "ended after step 12 of 20" in (run / "report.html").read_text() and told == []
    assert sorted(p.name for p in run.iterdir() if "report" in p.name) == ["report.html"]


def test_a_page_delays_the_next_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: list[subprocess.Popen[str]]
) -> None:
    now = 0.0
    monkeypatch.setattr(report_writer, "time", SimpleNamespace(monotonic=lambda: now))
    writer = ReportWriter(make_run(tmp_path / "run"), 1, pytest.fail)
    writer.write_step(1, {})
    pages[0].wait(timeout=120)
    writer.write_step(2, {})
    now = 0.5  # a page takes more than 0.05 CPU seconds, and may use a twentieth of the time
    writer.write_step(3, {})
    assert len(pages) == 1
    now = 1e6
    writer.write_step(4, {})
    assert len(pages) == 2
    writer.close()


@pytest.mark.parametrize("interval", [0, 1])
def test_a_report_that_cannot_be_written_is_one_warning(
    tmp_path: Path, interval: int, pages: list[subprocess.Popen[str]]
) -> None:
    told: list[str] = []
    writer = ReportWriter(tmp_path / "gone", interval, told.append)
    writer.write_step(1, {})
    if interval:
        pages[0].wait(timeout=120)
        writer.write_step(2, {})
    writer.close()
    assert len(told) == 1 and str(tmp_path / "gone") in told[0] and "training continues" in told[0]


def test_a_warning_that_cannot_be_printed_is_harmless(tmp_path: Path) -> None:
    def fail(text: str) -> None:
        raise ValueError("I/O operation on closed file")

    ReportWriter(tmp_path / "gone", 0, fail).close()
