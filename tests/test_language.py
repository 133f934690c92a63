"""Limits on the shape of code and documentation: lengths, docstrings and comments."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("grpo_mega", "tools", "examples", "slurm", "tests", ".github", ".ci")
SUFFIXES = {".py", ".md", ".sh", ".yaml", ".yml", ".js", ".html", ""}
FILES = sorted(
    path
    for path in [ROOT / "README.md", *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    if path.is_file()
    and path.suffix in SUFFIXES
    and path.name != "test_language.py"
    and "__pycache__" not in path.parts
)
TRAILING = re.compile(r"(of|and|as|those|the same)\b")  # such a comment needs the code to its left
NUM_WORDS = 24_000  # in all Markdown files


def trailing_comments(text: str) -> Iterator[str]:
    """Yield "LINE: COMMENT" for each trailing comment in a Python file that is not a complete thought."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline if "#" in text else lambda: ""):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            comment = token.string.lstrip("# ")
            if TRAILING.match(comment):
                yield f"{token.start[0]}: {comment}"


def test_trailing_comments_are_complete_thoughts() -> None:
    files = [path for path in FILES if path.suffix == ".py"]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}" for path in files for line in trailing_comments(path.read_text("utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_a_trailing_comment_that_needs_its_code_is_found() -> None:
    assert [*trailing_comments('# of a\ntext = "# of b"  # of those beside it\n')] == ["2: of those beside it"]


def test_markdown_has_at_most_24_000_words() -> None:
    assert sum(len(path.read_text("utf-8").split()) for path in FILES if path.suffix == ".md") <= NUM_WORDS


def test_docstrings_are_sentences() -> None:
    wrong = []
    for path in FILES:
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    docstring = ast.get_docstring(node) or ""
                    if re.match("(Of|What|Whether) ", docstring):
                        wrong.append(
                            f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0]!r}"
                        )
    assert not wrong, "\n".join(wrong)


def test_files_have_at_most_450_lines_and_functions_60() -> None:
    wrong = []
    for path in FILES:
        if path.suffix == ".py":
            text = path.read_text(encoding="utf-8")
            is_test = path.relative_to(ROOT).parts[0] == "tests"
            lengths = [(len(text.splitlines()), 500 if is_test else 450, str(path.relative_to(ROOT)))]
            if not is_test:
                lengths += [
                    (node.end_lineno - node.lineno + 1, 60, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
                    for node in ast.walk(ast.parse(text))
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
                ]
            wrong += [f"{name} has {lines} lines" for lines, most, name in lengths if lines > most]
    assert not wrong, "\n".join(wrong)


def test_all_folders_of_the_project_are_checked() -> None:
    assert len(FILES) > 400
    assert {path.relative_to(ROOT).parts[0] for path in FILES} >= {
        "README.md",
        "grpo_mega",
        "tools",
        "examples",
        "slurm",
        "tests",
    }


def test_names_of_tests_have_at_most_70_characters() -> None:
    texts = (
        path.read_text(encoding="utf-8")
        for path in FILES
        if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"
    )
    assert not [name for text in texts for name in re.findall(r"def (test_\w+)", text) if len(name) > 70]
