"""Every branch that only a GPU takes has a test, which tests/gpu/README.md names; and these work, as far as a CPU tells."""

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
HEADS = ("module", "---")


@dataclass(frozen=True)
class Entry:
    module: str  # below the package; a folder ends in "/"
    functions: tuple[str, ...]
    tests: tuple[str, ...]  # "path::name"


def entries() -> list[Entry]:
    """The rows of both tables. What is quoted in the first cell is a module, in the last one tests, in between functions."""
    found = []
    for line in (TESTS / "gpu" / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and cells[0] not in HEADS:
            first, *between, last = [tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells]
            functions = between[0] if len(between) == 2 else ()
            found.append(Entry(first[0], functions, last))
    return found


ENTRIES = entries()


def marked(folder: Path) -> Iterator[str]:
    """Modules with a marker, by their path below `folder`."""
    for path in sorted(folder.rglob("*.py")):
        if MARKERS.search(path.read_text()):
            yield path.relative_to(folder).as_posix()


@cache
def definitions(path: Path) -> frozenset[str]:
    """Of functions and classes, "f", "C" and "C.f"."""
    names: set[str] = set()

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + child.name)
                walk(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    walk(ast.parse(path.read_text()), "")
    return frozenset(names)


def test_every_module_that_speaks_of_gpus_is_listed() -> None:
    modules = [entry.module for entry in ENTRIES]
    folders = tuple(name for name in modules if name.endswith("/"))
    missing = [name for name in marked(PACKAGE) if name not in modules and not name.startswith(folders)]
    assert not missing, f"add to tests/gpu/README.md, with the test that covers it: {', '.join(missing)}"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.module)
def test_what_the_list_names_is_there(entry: Entry) -> None:
    path = PACKAGE / entry.module
    assert path.exists() and entry.tests
    if path.is_file():
        gone = set(entry.functions) - definitions(path)
        assert not gone, f"{entry.module} no longer has {', '.join(gone)}"
    for test in entry.tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).exists(), test
        assert name in definitions(TESTS / file), test


def test_a_marker_is_seen_and_a_word_like_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("if tensor.is_cuda:\n    pass\n")
    (tmp_path / "b.py").write_text("use_tensor = torch.cudart\n")
    assert list(marked(tmp_path)) == ["sub/a.py"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves run here")
def test_the_tests_for_a_gpu_work_as_far_as_a_cpu_tells() -> None:
    """At tiny sizes; and without the rehearsal all are skipped, with the reason."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(TESTS / "gpu")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GRPO_MEGA_REHEARSAL": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) >= 20, result.stdout[-1000:]
    assert "needs a GPU, and torch sees none here" in result.stdout
