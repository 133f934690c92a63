"""The infrastructure of the tests: selection of cases by commands, and forked ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import ROOT, launch, run_forked

CASES = """
import pytest

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.sweep)])
def test_x(n): pass
"""
READER = """
import time
from pathlib import Path
import pytest

@pytest.mark.pool
def test_passes(): pass

def test_waits():
    deadline = time.monotonic() + 120
    while "| test_second.py::test_waits" not in Path("output").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
"""
ENVIRONMENT = """
ROOT="$PWD"
VENV_PYTHON=true
ensure_env() { echo env; }
ensure_sglang() { echo sglang; }
ensure_te() { echo te; }
"""
RANK = """
import os, sys

assert __name__ != "__main__" or os.environ["RANK"] == sys.argv[1] and os.environ["WORLD_SIZE"] == "2"
if __name__ == "__main__" and sys.argv[1] == sys.argv[2]:
    raise ValueError("this rank fails")
"""
CASES_OF_RANKS = """
import os
from tests.helpers.ranks import run_cases

def fails(rank, folder):
    assert rank == 0, "one rank fails while the other waits"
    import torch.distributed as dist
    dist.barrier()

def ends(rank, folder):
    if rank == 0:
        os._exit(3)

def passes(rank, folder):
    (folder / f"passed {rank}").touch(exist_ok=False)

if __name__ == "__main__":
    run_cases({"fails": fails, "passes": passes, "ends": ends, "is the last": lambda *_: None})
"""


@pytest.mark.parametrize(
    ("arguments", "num_passed"),
    [
        ((), 1),
        (("--all",), 2),
        (("--sweep",), 3),
        (("-m", "full"), 1),
        (("-m", "sweep"), 1),
        (("test_cases.py::test_x[2]",), 1),
        (("test_cases.py::test_x[3]",), 1),
        (("test_cases.py",), 1),
    ],
)
def test_more_cases_run_with_all_or_sweep_or_by_name(
    arguments: tuple[str, ...], num_passed: int, tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n full\n sweep\npythonpath = {ROOT}\n")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert f"{num_passed} passed" in result.stdout, result.stdout


def test_several_processes_start_with_slow_files_and_report_their_progress(tmp_path: Path) -> None:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(
        conftest + "\nfrom tests.helpers import parallel\n\nparallel.INTERVAL = 0.1\n"
    )
    (tmp_path / "test_first.py").write_text("def test_fails():\n    assert False\n")
    (tmp_path / "test_second.py").write_text(READER)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n pool\npythonpath = {ROOT}\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "--no-loadscope-reorder"]
    with (tmp_path / "output").open("w") as output:
        result = subprocess.run(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT)
    text = (tmp_path / "output").read_text()
    assert result.returncode == 1 and "1 failed, 2 passed" in text, text
    assert "\nfailed: test_first.py::test_fails\n" in text, text
    assert re.search(r"^\d+ min \| 1 of 3 tests, 0 failed \| test_second.py::test_waits$", text, re.MULTILINE), text


@pytest.mark.parametrize("num_processes", [1, 3])
def test_a_test_that_ends_its_process_fails_and_the_others_run(num_processes: int, tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    fatal, passing = "import os\ndef test_ends():\n    os._exit(3)\n", "def test_{}():\n    pass\n"
    (tmp_path / "test_alone.py").write_text(fatal)
    (tmp_path / "test_between.py").write_text(passing.format("before") + fatal + passing.format("after"))
    (tmp_path / "test_other.py").write_text(passing.format("other"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {ROOT}\n")
    command = [sys.executable, "-m", "pytest", f"--numprocesses={num_processes}", "--no-loadscope-reorder"]
    with (tmp_path / "output").open("w") as output:
        result = subprocess.run(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, timeout=300)
    text = (tmp_path / "output").read_text()
    assert result.returncode == 1 and "2 failed, 3 passed" in text, text
    assert {"failed: test_alone.py::test_ends", "failed: test_between.py::test_ends"} <= set(text.splitlines()), text


@pytest.mark.parametrize(
    ("arguments", "installs"),
    [
        (("--fast",), False),
        (("tests/algorithm", "-k", "kl"), False),
        (("tests/rewards/test_format.py::test_x",), False),
        (("tests/algorithm", "tests/trainer"), True),
        (("--all",), True),
    ],
)
def test_the_fast_tests_need_neither_sglang_nor_transformer_engine(
    arguments: tuple[str, ...], installs: bool, tmp_path: Path
) -> None:
    for name in ("tests", "examples"):
        (tmp_path / name).mkdir()
    for folder in ("algorithm", "trainer", "rewards"):
        (tmp_path / "tests" / folder).mkdir()
    (tmp_path / "tests" / "rewards" / "test_format.py").touch()
    shutil.copy(ROOT / "tests" / "run.sh", tmp_path / "tests")
    (tmp_path / "examples" / "env.sh").write_text(ENVIRONMENT)
    result = subprocess.run(["bash", "tests/run.sh", *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == (["env", "sglang", "te"] if installs else ["env"])


def test_each_forked_rank_runs_the_file_and_a_failed_rank_is_named(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(RANK)
    run_forked(str(worker), 2, "{rank}", "none")
    with pytest.raises(AssertionError, match=r"ValueError: this rank fails\n(.|\n)*rank 1 failed"):
        run_forked(str(worker), 2, "{rank}", "1")


@pytest.mark.full
@pytest.mark.distributed
def test_a_failed_case_is_named_and_other_cases_still_run(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(CASES_OF_RANKS)
    found = launch(tmp_path / "worker.py", 2, tmp_path)
    assert list(found) == ["fails", "passes", "ends", "is the last"]
    assert any("one rank fails" in line for line in found["fails"])
    assert found["passes"] == found["is the last"] == []
    assert any("rank 0 ended" in line for line in found["ends"])


CHOSEN = """
import pytest
import torch.distributed as dist
from tests.helpers.ranks import ranks

@ranks(2)
def test_one_rank_fails(rank, folder):
    assert rank == 0, "rank 1 fails"
    dist.barrier()

@pytest.mark.parametrize("name", ["first", "second"])
@ranks(2)
def test_each_rank_takes_part(rank, folder, name):
    (folder / f"{name}{rank}").touch(exist_ok=False)
    assert name == "first", "the other is not chosen"

@ranks(3)
def test_other_numbers_of_ranks_have_another_launch(rank, folder):
    ranks = [None] * 3
    dist.all_gather_object(ranks, rank)
    assert ranks == [0, 1, 2]
"""


@pytest.mark.full
@pytest.mark.distributed
def test_ranks_makes_tests_that_fail_alone_and_run_only_if_chosen(tmp_path: Path) -> None:
    (tmp_path / "test_chosen.py").write_text(CHOSEN)
    arguments = (sys.executable, "-m", "pytest", "-q", "-k", "not second", "-p", "no:cacheprovider", "test_chosen.py")
    paths = os.pathsep.join(map(str, (ROOT, tmp_path)))
    result = subprocess.run(
        arguments, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert "1 failed, 2 passed, 1 deselected" in result.stdout, result.stdout + result.stderr
    assert "rank 1: Traceback" in result.stdout and "AssertionError: rank 1 fails" in result.stdout


@pytest.mark.distributed
@pytest.mark.parametrize("end", ["{}", '{"passes": lambda *_: None}'])
def test_ranks_that_fail_outside_of_a_case_fail_the_launch(end: str, tmp_path: Path) -> None:
    imports = "from tests.helpers.ranks import run_cases"
    text = f'{imports}\nif __name__ == "__main__":\n    run_cases({end})\n    raise ValueError("outside")\n'
    (tmp_path / "worker.py").write_text(text)
    with pytest.raises(AssertionError, match="outside"):
        launch(tmp_path / "worker.py", 2, tmp_path)
