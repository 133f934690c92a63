"""Runs with a long TMPDIR, and files of killed runs in a short TMPDIR, removed by the next start."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mega.processes import descendants
from tests.helpers.runs import run, start, wait_for_step
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.waiting]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kills.write_inputs(tmp_path_factory.mktemp("inputs"), "dp=2")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.full
def test_a_run_trains_with_a_long_tmpdir(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    code, output = run(config, tmp_path / "run", "--set", "steps=1")
    assert code == 0, output
    assert not list(long.iterdir())


@pytest.mark.full
def test_the_next_start_removes_files_of_a_killed_run_from_tmpdir(config: Path, tmp_path: Path, short: Path) -> None:
    process = start(config, tmp_path / "run", "--set", "steps=2000")
    wait_for_step(tmp_path / "run", 1, process)
    names = {path.name for path in short.rglob("*")}
    assert len(list(short.iterdir())) == 2 and not any("wandb" in name for name in names), names
    for pid in (process.pid, *descendants(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    code, output = run(config, tmp_path / "next", "--set", "steps=1")
    assert code == 0, output
    assert not list(short.iterdir())
