"""Training prompts are kept or dropped by their pass rate. Dropped prompts are counted. The file must match the
prompts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.config import RolloutConfig, validate
from grpo_mega.config.data import DataConfig
from grpo_mega.data import RunData, load_data
from grpo_mega.data.load import IDS_PER_SET, check_data, text_hash
from grpo_mega.errors import ConfigError
from tests.helpers.hostile_text import LINE_ENDS
from tests.helpers.models import make_tokenizer

SOLVED = [0, 1, 4, 8, None, 7, 8]  # correct samples of 8, per prompt; None if the gold answer cannot be read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two datasets, a.jsonl with five prompts and b.jsonl with three, and rates.jsonl without the last
    prompt.
    """
    texts = [f"q{i}" for i in range(8)]
    for name, part in (("a", texts[:5]), ("b", texts[5:])):
        write(tmp_path / f"{name}.jsonl", [{"prompt": text, "answer": "1"} for text in part])
    ids = [*range(5), *(IDS_PER_SET + i for i in range(3))]
    write(
        tmp_path / "rates.jsonl",
        [
            {
                "id": number,
                "hash": text_hash(f"<user>{text}<assistant>"),
                "samples": 8,
                "solved": solved,
                "prompt": LINE_ENDS,
            }
            for number, text, solved in zip(ids, texts, SOLVED, strict=False)
        ],
    )
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8-sig")


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8-sig") as lines:
        return [json.loads(line) for line in lines]


def config(folder: Path, **settings: Any) -> DataConfig:
    train = [str(folder / "a.jsonl"), str(folder / "b.jsonl")]
    return DataConfig.model_validate({"train": train, "pass_rates": str(folder / "rates.jsonl"), **settings})


def load(folder: Path, **settings: Any) -> RunData:
    return load_data(config(folder, **settings), make_tokenizer())


def texts(data: RunData) -> list[str]:
    return [prompt.text.removeprefix("<user>").removesuffix("<assistant>") for prompt in data.train]


def test_prompts_never_or_always_solved_are_dropped_and_counted(folder: Path) -> None:
    data = load(folder, min_pass_rate=0.1, max_pass_rate=0.9)
    assert texts(data) == ["q1", "q2", "q4", "q5", "q7"]
    assert data.sizes == (3, 2)
    note = data.notes[-1]
    assert note.startswith(f"data.pass_rates={folder}/rates.jsonl: 3 of 8 ")
    numbers = re.findall(r"\d[\d.]*", note.partition("rates.jsonl: ")[2])
    assert numbers == ["3", "8", "1", "0.1", "2", "0.9", "1", "2", "2"]


def test_limits_are_inclusive_and_each_may_be_omitted(folder: Path) -> None:
    assert texts(load(folder, min_pass_rate=0.125)) == ["q1", "q2", "q3", "q4", "q5", "q6", "q7"]
    assert texts(load(folder, max_pass_rate=0.5)) == ["q0", "q1", "q2", "q4", "q7"]


def test_held_out_prompts_do_not_depend_on_the_pass_rates(folder: Path) -> None:
    with_rates, without = load(folder, min_pass_rate=0.1, heldout_size=2), load(folder, pass_rates=None, heldout_size=2)
    assert with_rates.heldout_sets == without.heldout_sets
    assert set(texts(with_rates)) == set(texts(without)) - {"q0"}


def test_a_file_of_other_prompts_is_refused(folder: Path) -> None:
    rates = folder / "rates.jsonl"
    rows = read(rates)
    write(rates, [*rows[:2], rows[2] | {"hash": text_hash("<user>another<assistant>")}])
    with pytest.raises(ConfigError, match=r"data\.pass_rates=.*prompt 2.*; evaluate"):
        load(folder, min_pass_rate=0.1)
    write(rates, [row | {"id": 7_000_000_000 + row["id"]} for row in rows])
    with pytest.raises(ConfigError, match=r"data\.pass_rates=.*; evaluate"):
        load(folder, min_pass_rate=0.1)


def test_limits_that_drop_a_whole_set_are_refused(folder: Path) -> None:
    rates = folder / "rates.jsonl"
    write(rates, [row | {"solved": 0} for row in read(rates)])
    with pytest.raises(ConfigError, match=r"none .* 5 prompts .*data\.train\.0; widen"):
        load(folder, min_pass_rate=0.1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, r"data\.pass_rates=.*rates\.jsonl cannot be read \(.*; write it with grpo-mega eval CONFIG --train-set"),
        ("{", r"rates\.jsonl:1 has no id, hash, samples and solved"),
        ('{"id": 0, "hash": "a", "correct": true}\n', r"rates\.jsonl:1 has no id, hash, samples and solved"),
        ('{"id": 0, "hash": "a", "samples": 0, "solved": 0}\n', r"rates\.jsonl:1 has no id, hash, samples and solved"),
    ],
)
def test_a_file_without_rates_is_an_error_before_anything_is_loaded(
    folder: Path, content: str | None, problem: str
) -> None:
    path = folder / "rates.jsonl"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        check_data(config(folder, min_pass_rate=0.1), 2, RolloutConfig())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, r"data\.pass_rates=.* needs data\.min_pass_rate or data\.max_pass_rate"),
        ({"pass_rates": None, "max_pass_rate": 0.9}, r"data\.max_pass_rate=0\.9 needs data\.pass_rates"),
        (
            {"min_pass_rate": 0.9, "max_pass_rate": 0.1},
            r"data\.min_pass_rate=0\.9 is above data\.max_pass_rate=0\.1; lower it",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(folder: Path, settings: dict[str, Any], problem: str) -> None:
    data = {"train": str(folder / "a.jsonl"), "pass_rates": str(folder / "rates.jsonl"), **settings}
    with pytest.raises(ConfigError, match=problem):
        validate({"run_dir": "r", "steps": 1, "model": {"path": "m"}, "data": data})
