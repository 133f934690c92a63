"""`python tests/helpers/english.py [PATH ...]`: how often the prose of each file uses words that plain English rarely needs.

Prose is docstrings, comments, Markdown outside of code, and string literals of at least four words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {  # largest number per 10,000 words
    "those": 6.0,
    "which": 25.0,
    "what": 8.0,
    "begin|begins|began|begun|beginning": 1.0,
    "beside": 0.5,
    "of (its|their) own": 1.0,
}
TRAILING = r"# (of|and|as|those|the same)\b"  # such a comment needs the code to its left
NUM_WORDS = 4  # of a string literal that is a sentence
SUFFIXES = (".py", ".md", ".sh", ".yaml", ".yml")


def prose(path: Path) -> str:
    """Return the prose of a file, each piece on a line of its own."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        return "\n".join(_python_prose(text))
    if path.suffix == ".md":
        return re.sub(r"^```.*?^```|`[^`\n]*`", " ", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(match[1] for match in re.finditer(r"(?:^|\s)#(?!!)\s*(.*)$", text, re.MULTILINE))


def _python_prose(text: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("#!"):
            yield token.string.lstrip("# ")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= NUM_WORDS:
            yield node.value


def trailing_comments(path: Path) -> list[str]:
    """Return the trailing comments of a Python file that are no complete thought, as "LINE: COMMENT"."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        f"{token.start[0]}: {token.string}"
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline)
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip() and re.match(TRAILING, token.string)
    ]


def count(paths: Iterable[Path]) -> tuple[int, dict[str, int]]:
    """Return the number of words in the prose of these files, and how often each pattern of LIMITS occurs."""
    texts = [prose(path) for path in paths]
    num_words = sum(len(re.findall(r"[A-Za-z][A-Za-z'-]*", text)) for text in texts)
    return num_words, {
        pattern: sum(len(re.findall(rf"\b({pattern})\b", text, re.IGNORECASE)) for text in texts) for pattern in LIMITS
    }


def ratios(paths: Iterable[Path]) -> dict[str, float]:
    """Return the occurrences of each pattern per 10,000 words."""
    num_words, counts = count(paths)
    return {pattern: 1e4 * number / max(1, num_words) for pattern, number in counts.items()}


def files_below(*paths: Path) -> list[Path]:
    """Return the files of these folders, and these files, that hold prose."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return [file for file in files if file.suffix in SUFFIXES and not {"__pycache__", "data"} & {*file.parts[-3:-1]}]


def main(names: list[str]) -> None:
    files = files_below(*(Path(name) for name in names))
    print("words", *LIMITS)
    for file in files:
        num_words, counts = count([file])
        print(f"{num_words:7d}", *(f"{number:4d}" for number in counts.values()), file)
        if file.suffix == ".py":
            print(*(f"        {file}:{line}\n" for line in trailing_comments(file)), sep="", end="")
    for pattern, ratio in ratios(files).items():
        print(f"{pattern}: {ratio:.1f} per 10,000 words, at most {LIMITS[pattern]}")


if __name__ == "__main__":
    main(sys.argv[1:] or [str(ROOT)])
