"""Links, files, tests, config keys and model families that READMEs name exist, and the front page stays short."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from grpo_mega.cli.commands.config import find_keys
from grpo_mega.config import Config
from grpo_mega.weights.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
READMES = TRACKED or [str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/README.md")]
FOLDERS = ("grpo_mega", "tools", "examples", "slurm", "tests", "findings")
SOURCE = re.compile(r"(?<![\w/.-])(?:\.{0,2}/)?[\w./-]*\w\.(?:py|sh|yaml)(?![\w/])")
PATTERNS = ("config.yaml", "my_*.py", "train_reward_model.sh", "MODULE_OR_FILE.py", "NAME.*", "file.py")  # a user's own
FAMILIES_PAGE = "grpo_mega/README.md"  # it lists every family


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@cache
def source_files() -> frozenset[str]:
    """Return every path of a source file, and each of its ends, such as trainer/job.py and job.py."""
    paths = [path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    parts = [path.parts for path in paths if path.suffix in {".py", ".sh", ".yaml"}]
    return frozenset("/".join(names[i:]) for names in parts for i in range(len(names)))


@cache
def config_keys() -> re.Pattern[str]:
    """Return a pattern of all keys. A NAME that the user chooses is any word."""
    names = [key.name.replace("[]", "") for key in find_keys(Config)]
    return re.compile("|".join(re.escape(name).replace("NAME", r"\w+") for name in names))


def missing_files(text: str) -> list[str]:
    """Return the source files that a page names and that do not exist, apart from a user's own."""
    named = {re.sub(r"^(\.{0,2}/)+", "", name) for name in SOURCE.findall(re.sub(r"\w+://\S+", "", text))}
    return sorted(name for name in named if name not in source_files() and not any(map(Path(name).match, PATTERNS)))


def tables_of(text: str) -> list[list[str]]:
    """Return the first cell of each row, table by table."""
    tables = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    return [[row.split("|")[1] for row in table.splitlines()] for table in tables]


def unknown_keys(text: str) -> list[str]:
    """Return the quoted config keys, such as `rollout.tp`, that the schema does not have. Keys of verl do not count."""
    text = re.sub(r"verl's\s+`[^`]+`", "", text)
    if "| verl" in text:
        text = re.sub(r"^(\|[^|]*\|).*$", r"\1", text, flags=re.MULTILINE)
    quoted = set(re.findall(r"`([a-z]+(?:\.\w+)+)(?=[`:=, ])", text))
    return sorted(
        key
        for key in quoted
        if key.split(".")[0] in Config.model_fields
        and not key.endswith((".py", ".md", ".yaml"))
        and not config_keys().fullmatch(key)
    )


@pytest.mark.parametrize("name", READMES)
def test_every_link_leads_to_a_file_and_heading(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{name} links {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, (
                f"{name} links {target}"
            )


@pytest.mark.parametrize("name", READMES)
def test_every_named_source_file_exists(name: str) -> None:
    assert missing_files(text_of(name)) == []


@pytest.mark.parametrize("name", [name for name in READMES if name != "tests/gpu/README.md"])  # a row per function
def test_no_table_lists_a_file_twice(name: str) -> None:
    for cells in tables_of(text_of(name)):
        files = [file for cell in cells for file in re.findall(r"`([\w./-]+\.(?:py|sh|yaml))`", cell)]
        assert sorted(files) == sorted(set(files))


@pytest.mark.parametrize("name", READMES)
def test_every_named_config_key_exists(name: str) -> None:
    assert unknown_keys(text_of(name)) == []


@pytest.mark.parametrize("name", READMES)
def test_every_named_test_and_definition_exists(name: str) -> None:
    text = text_of(name)
    for file, test in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", text):
        assert f"def {test}(" in text_of(f"tests/{file}"), f"{name} names {file}::{test}"
    for word, file in re.findall(r"`(\w+)` of\s+((?:tests|grpo_mega|tools)/[\w/]+\.py)", text):
        assert re.search(rf"^(def |class )?{word}\b", text_of(file), re.MULTILINE), f"{name} names {word} of {file}"


def test_every_test_listed_against_a_silent_failure_exists() -> None:
    rows = re.findall(r"^\|.*`[\w/]+\.py.*$", text_of("tests/README.md"), re.MULTILINE)
    assert len(rows) > 100
    for file in re.findall(r"`([\w/]+\.py)", "\n".join(rows)):
        assert (ROOT / "tests" / file).exists(), f"tests/README.md lists {file}"


def test_the_list_of_families_has_all_of_them() -> None:
    words = set(re.findall(r"\w+", text_of(FAMILIES_PAGE)))
    assert {family.removesuffix("_text") for family in FAMILIES} <= words


def test_stale_pointers_are_found() -> None:
    page = "| `server_main.py` | a |\n| `server_main.py` | b |\n`../checks/gone.py`, `trainer/job.py`, `my_rewards.py`"
    assert missing_files(page) == ["checks/gone.py"]
    assert tables_of(page) == [[" `server_main.py` ", " `server_main.py` "]]
    assert unknown_keys("`rollout.tp`, `rollout.tpp: 2`, `teachers.main.url`, `numpy.array`") == ["rollout.tpp"]


def test_the_front_page_has_at_most_110_lines() -> None:
    assert len(text_of("README.md").splitlines()) <= 110
