"""`grpo-mega config` prints the descriptions in the schema, and every key has one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest

from grpo_mega.cli import main
from grpo_mega.config import Config
from grpo_mega.config.base import Section
from grpo_mega.config.rollout import RolloutConfig


def sections_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections_in(field.annotation)
    for inner in get_args(annotation):
        yield from sections_in(inner)


def test_every_key_has_a_description_in_full_sentences() -> None:
    sections = set(sections_in(Config))
    assert len(sections) > 18
    for section in sections:
        for name, field in section.model_fields.items():
            text = field.description or ""
            assert len(text.split()) >= 2 and text.endswith("."), f"{section.__name__}.{name}: {text!r}"
            assert "  " not in text, f"{section.__name__}.{name}: {text!r}"


def test_a_key_is_printed_with_its_type_default_and_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "rollout.top_k"]) == 0
    description = RolloutConfig.model_fields["top_k"].description
    assert capsys.readouterr().out.startswith(f"rollout.top_k: whole number; default 0\n    {description}\n")


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("sync", ["sync", "sync.bucket_mib", "sync.verify", "sync.lora"]),
        ("teachers.main.url", ["teachers.NAME.url"]),
        ("data.train.weight", ["data.train[].weight"]),
        (
            "data.heldout_sets",
            [f"data.heldout_sets{key}" for key in ("", ".NAME.path", ".NAME.prompt_column", ".NAME.answer_column")],
        ),
    ],
)
def test_a_section_is_printed_with_all_of_its_keys(
    wanted: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", wanted]) == 0
    assert [line.split(": ")[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()] == names


def test_the_reference_in_markdown_has_a_row_per_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    names = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines() if line[:1].strip()]
    assert main(["config", "--markdown"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("`")[1] for row in rows[2:]] == names
    assert len(names) > 200 and len(set(names)) == len(names)
    assert all(row.count("|") - row.count("\\|") == 5 for row in rows)


@pytest.mark.parametrize(
    ("wanted", "remedy"),
    [
        ("rollout.topk", "did you mean rollout.top_k?"),
        ("", "use one of run_dir, steps, seed"),
        ("42", "use one of run_dir"),
    ],
)
def test_an_unknown_key_is_a_one_line_error_with_a_remedy(
    wanted: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", wanted]) == 2
    line = capsys.readouterr().err
    assert (
        line.startswith(f"grpo-mega: error: {wanted!r} is not a key of the config; {remedy}") and line.count("\n") == 1
    )
