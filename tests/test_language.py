"""Code and documentation are written in the plain English of the field: words that are rare, and forms that are not
used.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.helpers import english

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
PROGRAM = '''"""Those which begin."""
which = "what which"  # of those beside it
raise ValueError("those of its own", f"{which} which is what those say")
'''


def test_plain_english_needs_few_of_these_words() -> None:
    found = english.ratios([path for path in FILES if path.suffix in english.SUFFIXES])
    for pattern, ratio in found.items():
        print(f"{pattern}: {ratio:.1f} per 10,000 words, at most {english.LIMITS[pattern]}")
    assert all(ratio <= english.LIMITS[pattern] for pattern, ratio in found.items())


def test_trailing_comments_are_complete_thoughts() -> None:
    files = [path for path in FILES if path.suffix == ".py"]
    wrong = [f"{path.relative_to(ROOT)}:{line}" for path in files for line in english.trailing_comments(path)]
    assert not wrong, "\n".join(wrong)


def test_words_are_counted_where_they_are_prose(tmp_path: Path) -> None:
    """Neither names, short strings, nor code in Markdown count."""
    path = tmp_path / "a.py"
    path.write_text(PROGRAM)
    assert [*english.count([path])[1].values()] == [4, 2, 1, 1, 1, 1]
    assert english.trailing_comments(path) == ["2: of those beside it"]
    path = tmp_path / "a.md"
    path.write_text("Those\n```\nwhich\n```\n`what` which\n")
    assert [*english.count([path])[1].values()] == [1, 1, 0, 0, 0, 0]


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


def test_names_of_tests_have_at_most_70_characters() -> None:
    texts = (
        path.read_text(encoding="utf-8")
        for path in FILES
        if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"
    )
    assert not [name for text in texts for name in re.findall(r"def (test_\w+)", text) if len(name) > 70]
