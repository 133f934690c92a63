"""tests/gpu/README.md names modules, functions and tests that exist; the GPU tests work as far as a CPU can tell."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "grpo_mega", ROOT / "tests"


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


def missing_names(page: str) -> list[str]:
    """Return the modules that a page's lines start with, their functions and the tests, that do not exist."""
    missing = []
    for line in page.splitlines():
        words = re.findall(r"`([^`]+)`", line) if line.startswith("| `") else []
        for test in (word for word in words if "::" in word):
            file, _, name = test.partition("::")
            if not (TESTS / file).exists() or name not in definitions(TESTS / file):
                missing.append(test)
        if words and "::" not in words[0]:
            module = PACKAGE / words[0]
            if not module.exists():
                missing.append(words[0])
            elif module.is_file():
                functions = {word for word in words[1:] if not re.search("::|/", word)}
                missing += sorted(functions - definitions(module))
    return missing


def test_modules_functions_and_tests_in_the_list_exist() -> None:
    page = (TESTS / "gpu" / "README.md").read_text()
    assert page.count("::test_") > 50 and missing_names(page) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    page = "| `types.py` | `Sample.is_scored`, `Gone.f` | `gpu/test_memory.py::test_gone` |\n| `gone/` | |"
    assert missing_names(page) == ["gpu/test_memory.py::test_gone", "Gone.f", "gone/"]


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
