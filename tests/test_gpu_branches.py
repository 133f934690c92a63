"""Every GPU-only branch has a test that tests/gpu/README.md names, and these tests work as far as a CPU can tell."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "grpo_mega", ROOT / "tests"
MARKERS = re.compile(r"is_cuda|uses_transformer_engine|torch\.cuda\b|uses?_te\b|DeviceBuckets|memory_saver|fp8")
HEADS = ("module", "test", "---")


@dataclass(frozen=True)
class Entry:
    module: str  # path below the package; a folder ends in "/"
    functions: tuple[str, ...]
    emulated: tuple[str, ...]  # "path::name" of tests that also run on emulated kernels
    others: tuple[str, ...]

    @property
    def tests(self) -> tuple[str, ...]:
        return self.emulated + self.others


def rows(width: int) -> list[list[tuple[str, ...]]]:
    """Return the rows of the tables with `width` columns. A cell is a tuple of its quoted words."""
    lines = (TESTS / "gpu" / "README.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [
        [tuple(re.findall(r"`([^`]+)`", cell)) for cell in row]
        for row in cells
        if len(row) == width and row[0] not in HEADS
    ]


def entries() -> list[Entry]:
    """Return the modules of both tables. Only the first table lists functions and where their tests run."""
    branches = [Entry(module[0], functions, emulated, others) for module, functions, _, emulated, others in rows(5)]
    return branches + [Entry(module[0], (), (), tests) for module, _, tests in rows(3)]


@cache
def emulated_tests() -> dict[str, bool]:
    """Return whether a test of tests/gpu or its module has the mark `emulated`, keyed by "gpu/file::name"."""
    found: dict[str, bool] = {}
    for path in sorted((TESTS / "gpu").glob("test_*.py")):
        body = ast.parse(path.read_text()).body
        marks = [
            ast.unparse(node)
            for node in body
            if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets[0])
        ]
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = marks + [ast.unparse(decorator) for decorator in node.decorator_list]
                found[f"gpu/{path.name}::{node.name}"] = any("pytest.mark.emulated" in mark for mark in said)
    return found


ENTRIES = entries()


def marked(folder: Path) -> Iterator[str]:
    """Yield the modules with a marker, as paths below `folder`."""
    for path in sorted(folder.rglob("*.py")):
        if MARKERS.search(path.read_text()):
            yield path.relative_to(folder).as_posix()


@cache
def definitions(path: Path) -> frozenset[str]:
    """Return the names of functions and classes, "f", "C" and "C.f"."""
    names: set[str] = set()

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + child.name)
                walk(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    walk(ast.parse(path.read_text()), "")
    return frozenset(names)


def test_every_module_that_mentions_gpus_is_listed() -> None:
    modules = [entry.module for entry in ENTRIES]
    folders = tuple(name for name in modules if name.endswith("/"))
    missing = [name for name in marked(PACKAGE) if name not in modules and not name.startswith(folders)]
    assert not missing, f"add to tests/gpu/README.md, with the test that covers it: {', '.join(missing)}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.module)
def test_everything_in_the_list_exists(entry: Entry) -> None:
    path = PACKAGE / entry.module
    assert path.exists() and entry.tests
    if path.is_file():
        gone = set(entry.functions) - definitions(path)
        assert not gone, f"{entry.module} no longer has {', '.join(gone)}"
    for test in entry.tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).exists(), test
        assert name in definitions(TESTS / file), test


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.module)
def test_the_list_marks_tests_that_run_on_emulated_kernels(entry: Entry) -> None:
    marks = emulated_tests()
    assert all(marks.get(test, not test.startswith("gpu/")) for test in entry.emulated), entry.emulated
    if entry.functions:
        assert not any(marks.get(test) for test in entry.others), entry.others


def test_tests_that_need_a_real_gpu_are_listed_and_few() -> None:
    listed = [test for (test, *_), _ in rows(2)]
    assert listed == [test for test, is_emulated in emulated_tests().items() if not is_emulated]
    assert len(listed) <= 30 and len(emulated_tests()) - len(listed) >= 18


def test_a_marker_is_detected_and_a_similar_word_is_not(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("if tensor.is_cuda:\n    pass\n")
    (tmp_path / "b.py").write_text("use_tensor = torch.cudart\n")
    assert list(marked(tmp_path)) == ["sub/a.py"]


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run here")
def test_the_gpu_tests_work_as_far_as_a_cpu_can_run_them() -> None:
    """They run with tiny sizes. Without the rehearsal all are skipped with the reason."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(TESTS / "gpu")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GRPO_MEGA_REHEARSAL": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) >= 20, result.stdout[-1000:]
    assert "needs a GPU, and torch sees none here" in result.stdout
