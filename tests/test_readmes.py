"""Linked files and listed tests in READMEs exist, and the front page stays short."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
READMES = TRACKED or [str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/README.md")]


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


def test_every_test_listed_against_a_silent_failure_exists() -> None:
    rows = [
        line for line in (ROOT / "tests" / "README.md").read_text().splitlines() if re.match(r"\|.*`[\w/]+\.py", line)
    ]
    assert len(rows) > 30
    for row in rows:
        for file, test in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row):
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not test or f"def {test}(" in text, f"tests/README.md lists {file}::{test}"


def test_every_test_listed_for_an_element_of_a_text_exists() -> None:
    section = (
        (ROOT / "grpo_mega/algorithm/README.md").read_text(encoding="utf-8").partition("## What texts on GRPO have")[2]
    )
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+)(\.\.\.)?)?`", section.partition("\n## ")[0])
    assert len(named) > 20
    for file, test, cut in named:
        path = ROOT / "tests" / ("" if "/" in file else "algorithm") / file
        assert re.search(rf"def {test}{'' if cut or not test else r'[(]'}", path.read_text(encoding="utf-8")), (
            file,
            test,
        )


def test_the_front_page_has_at_most_160_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
