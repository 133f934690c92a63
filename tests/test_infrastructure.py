"""The ground that the tests themselves stand on: which cases a command selects, and ranks that are forked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_forked

CASES = """
import pytest

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full)])
def test_x(n): pass
"""
RANK = """
import os, sys

assert __name__ != "__main__" or os.environ["RANK"] == sys.argv[1] and os.environ["WORLD_SIZE"] == "2"
if __name__ == "__main__" and sys.argv[1] == sys.argv[2]:
    raise ValueError("this rank fails")
"""


@pytest.mark.parametrize(
    ("arguments", "num_passed"),
    [((), 1), (("--all",), 2), (("-m", "full"), 1), (("test_cases.py::test_x[2]",), 1), (("test_cases.py",), 1)],
)
def test_full_cases_run_with_all_or_by_name(arguments: tuple[str, ...], num_passed: int, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert f"{num_passed} passed" in result.stdout, result.stdout


def test_forked_ranks_run_the_file_each_and_one_that_fails_is_named(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(RANK)
    run_forked(str(worker), 2, "{rank}", "none")
    with pytest.raises(AssertionError, match=r"ValueError: this rank fails\n(.|\n)*rank 1 failed"):
        run_forked(str(worker), 2, "{rank}", "1")
