"""`python tests/helpers/english.py [PATH ...]`: how often the prose of each file uses words that plain English rarely
needs.

Prose is docstrings, comments, Markdown outside of code, and string literals of at least four words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
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
TRAILING = r"(of|and|as|those|the same)\b"  # such a comment needs the code to its left
NUM_WORDS = 4  # a string literal with fewer words is no sentence
SUFFIXES = (".py", ".md", ".sh", ".yaml", ".yml")


def prose(path: Path) -> str:
    """Return the prose of a file, each piece on a line of its own."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        return "\n".join([comment for _, comment, _ in comments(path)] + [*_texts(ast.parse(text))])
    if path.suffix == ".md":
        return re.sub(r"^```.*?^```|`[^`\n]*`", " ", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join(re.findall(r"(?:^|\s)#(?!!)\s*(.*)$", text, re.MULTILINE))


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yield docstrings, and other strings of enough words. A value in an f-string is one character."""
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "_" for part in node.values]
            nodes += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
            text = "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            nodes += ast.iter_child_nodes(node)
            text = ""
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = str(node.value.value)
                nodes.remove(node.value)
        if len(text.split()) >= NUM_WORDS or isinstance(node, ast.Expr):
            yield text


@cache
def comments(path: Path) -> list[tuple[int, str, bool]]:
    """Return line, text, and whether code stands before it, of each comment in a Python file."""
    text = path.read_text(encoding="utf-8")
    if "#" not in text:
        return []
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    return [
        (t.start[0], t.string.lstrip("# "), bool(t.line[: t.start[1]].strip())) for t in tokens if t.string[:2] != "#!"
    ]


def trailing_comments(path: Path) -> list[str]:
    """Return the trailing comments of a Python file that are no complete thought, as "LINE: COMMENT"."""
    return [f"{line}: {text}" for line, text, is_trailing in comments(path) if is_trailing and re.match(TRAILING, text)]


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
