"""Code and documentation are written in the plain English of the field: words and forms that are not used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("grpo_mega", "tools", "examples", "slurm", "tests", ".github", ".ci")
SUFFIXES = {".py", ".md", ".sh", ".yaml", ".yml", ".js", ".html", ""}
FILES = sorted(
    path
    for path in [ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    if path.is_file() and path.suffix in SUFFIXES and path.name != "test_language.py" and "__pycache__" not in path.parts
)
UNITS = "bytes|checks|FLOPs|GiB|KiB|MiB|ms|responses|samples|seconds|sequences|tokens|verdicts"
WORDS = {
    r"\b(anew|amid|likewise|whoever|nobody|naive twins?)\b": "is not a word of the field",
    r"\bmend(s|ed|ing)?\b": "say fix or correct",
    r"\b(a|of) mixtures?\b": "say MoE model",
    rf"\b({UNITS})(/s)? an? (card|device|GPU|group|layer|node|rank|replica|second|server|step|token|worker)\b": "say per",
    r"\bs a (rank|step|token)\b": "say per",
}


@pytest.mark.parametrize("pattern", WORDS)
def test_words_are_those_of_the_field(pattern: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]!r} {WORDS[pattern]}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if re.search(pattern, line, re.IGNORECASE)
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_are_sentences() -> None:
    wrong = []
    for path in FILES:
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    docstring = ast.get_docstring(node) or ""
                    if re.match("(Of|What|Whether) ", docstring):
                        wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]!r}")
    assert not wrong, "\n".join(wrong)


def test_files_have_at_most_400_lines_and_functions_60() -> None:
    wrong = []
    for path in FILES:
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            lengths = [(len(text.splitlines()), 400, str(path.relative_to(ROOT)))]
            if path.relative_to(ROOT).parts[0] != "tests":
                lengths += [
                    (node.end_lineno - node.lineno + 1, 60, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
                    for node in ast.walk(ast.parse(text))
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
                ]
            wrong += [f"{name} has {lines} lines" for lines, most, name in lengths if lines > most]
    assert not wrong, "\n".join(wrong)


def test_the_words_are_looked_for_in_all_of_the_project() -> None:
    assert len(FILES) > 400
    assert {path.relative_to(ROOT).parts[0] for path in FILES} >= {
        "README.md",
        "grpo_mega",
        "tools",
        "examples",
        "slurm",
        "tests",
    }
