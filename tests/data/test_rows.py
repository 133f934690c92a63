"""Rows of real datasets: numbers of every type, nested columns as in verl's files, and message content in parts."""

import json
import math
import re
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_mega.config import DataConfig
from grpo_mega.data.rows import Conversation, DataRow, answer_of, find_columns, messages_of, read_conversations
from grpo_mega.errors import ConfigError
from grpo_mega.rewards.math.accuracy import accuracy

VERL = [  # rows like in DAPO-Math-17k
    {
        "data_source": "math_dapo",
        "prompt": [{"content": f"What is {n} + {n}?\u2028Think first.", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2 * n), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{n}", "teacher": {"name": "main"}},
    }
    for n in (3, 17, 170141183460469231731687303715884105727)
]
NESTED = {"prompt_column": "prompt", "answer_column": "reward_model.ground_truth"}


def row(**values: Any) -> DataRow:
    return DataRow(4, "set.jsonl:5", values)


def read(path: Path, **settings: Any) -> list[Conversation]:
    config = DataConfig.model_validate({"train": str(path)} | settings)
    return read_conversations(config.train[0], config)


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ({"prompt": "a", "answer": "1"}, ("prompt", "answer")),
        ({"question": "a", "problem": "b", "prompt": "c", "solution": "1", "answer": "2"}, ("prompt", "answer")),
        ({"question": "a", "problem": "b", "solution": "1"}, ("problem", "solution")),
        ({"question": "a", "reward_model": {"ground_truth": "1"}}, ("question", "reward_model.ground_truth")),
    ],
)
def test_columns_that_are_not_given_are_guessed_in_one_order(values: dict[str, Any], columns: tuple[str, str]) -> None:
    assert find_columns(row(**values), None, None) == columns
    assert find_columns(row(**values), "x", "y") == ("x", "y")


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"text": "a", "answer": "1"}, "prompt_column"),
        ({"prompt": "a", "reward_model": {"truth": "1"}}, "answer_column"),
        ({"prompt": "a", "reward_model": "1"}, "answer_column"),
    ],
)
def test_a_row_without_the_usual_columns_is_refused_with_its_columns(values: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"set.jsonl:5: {key} .*{', '.join(values)}; set data.{key}"):
        find_columns(row(**values), None, None)


@pytest.mark.parametrize(
    ("value", "right"),
    [
        (3, "3"),
        (0, "0"),
        (-0.0, "0"),
        (3.0, "3"),
        (0.1, "1/10"),
        (1e22, "10000000000000000000000"),
        (1e-7, "0.0000001"),
        (10**400, "1" + "0" * 400),
        (Decimal("3.50"), "7/2"),
        (Decimal("1E+2"), "100"),
        (Fraction(-1, 3), "-1/3"),
        (np.int8(-7), "-7"),
        (np.uint64(2**64 - 1), "18446744073709551615"),
        (np.float32(0.5), "0.5"),
        (np.float64(2.5), "5/2"),
    ],
)
def test_a_number_of_any_type_is_an_answer_that_a_response_can_match(value: Any, right: str) -> None:
    gold = answer_of(row(answer=value), "answer")
    assert Fraction(gold) == Fraction(str(value))
    assert accuracy("", rf"\boxed{{{right}}}", gold, {}).value == 1.0


NOT_FINITE = [
    math.nan,
    math.inf,
    -math.inf,
    np.float32("nan"),
    np.float64("-inf"),
    Decimal("NaN"),
    Decimal("-Infinity"),
]
NOT_FINITE += [Decimal("sNaN"), "nan", " NaN\n", "inf", "-inf", "Infinity", "-Infinity", "+INF"]


@pytest.mark.parametrize("value", NOT_FINITE, ids=repr)
def test_an_answer_that_is_not_finite_is_refused_with_its_row(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^set\.jsonl:5: gold=.*; correct or remove") as caught:
        answer_of(row(gold=value), "gold")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, False, np.bool_(True), None, "", " \u2028", [1], {"a": 1}, 1j, b"3"], ids=repr)
def test_values_that_are_neither_text_nor_number_are_no_answer(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^set\.jsonl:5: gold=.*; write a text"):
        answer_of(row(gold=value), "gold")


@pytest.mark.parametrize("text", ["Nan", "infinity", r"\infty", "information", "nano", "3.0", " 7 "])
def test_texts_that_look_like_nonfinite_numbers_are_kept(text: str) -> None:
    assert answer_of(row(gold=text), "gold") == text


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_numbers_that_are_not_finite_are_refused_when_a_file_is_read(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": "a", "answer": 1.5}, {"prompt": "b", "answer": math.nan}]
    path = tmp_path / f"set.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(ConfigError, match=re.escape(f"{path}:2: " if suffix == "jsonl" else f"{path}, row 1: ")):
        read(path)
    decimals = pa.table(
        {"prompt": ["a"], "answer": pa.array([Decimal("12345678901234567890.5")], pa.decimal128(30, 1))}
    )
    parquet.write_table(decimals, tmp_path / "decimals.parquet")
    assert read(tmp_path / "decimals.parquet")[0].answer == "12345678901234567890.5"


@pytest.mark.parametrize(
    "value", [datetime(2024, 1, 5), date(2024, 1, 5), 1.2345678901234568e22, -9007199254740992.0], ids=repr
)
@pytest.mark.parametrize("form", ["file", "folder", "saved"])
def test_answers_that_a_table_may_have_changed_are_refused(tmp_path: Path, value: Any, form: str) -> None:
    table, path = pa.table({"prompt": ["a", "b"], "answer": [value, value]}), tmp_path / "set"
    if form == "saved":
        datasets.disable_progress_bars()
        datasets.Dataset(table).save_to_disk(path)
    else:
        path.mkdir()
        parquet.write_table(table, path / "train.parquet")
    problem = r"set\S*, row 0: answer=.* may not be what was written, .*; store answers as text, or name a \.jsonl file"
    with pytest.raises(ConfigError, match=problem) as caught:
        read(path / "train.parquet" if form == "file" else path)
    assert "\n" not in str(caught.value)


def test_other_numbers_of_a_table_are_answers(tmp_path: Path) -> None:
    for number, values in enumerate(([2**63 - 1, -7], [0.5, 9007199254740991.0], [Decimal("12345678901234567890.5")])):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(pa.table({"prompt": ["a"] * len(values), "answer": values}), path)
        assert [one.answer for one in read(path)] == list(map(str, values))


@pytest.mark.parametrize("form", ["file", "folder", "jsonl"])
def test_verls_files_load_unchanged(tmp_path: Path, form: str) -> None:
    path = tmp_path / "set"
    path.mkdir()
    if form == "jsonl":
        (path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in VERL))
    else:
        parquet.write_table(pa.Table.from_pylist(VERL), path / "train.parquet", row_group_size=2)
    found = read(path if form == "folder" else next(path.iterdir()), **NESTED)
    assert [one.answer for one in found] == ["6", "34", "340282366920938463463374607431768211454"]
    assert [one.messages for one in found] == [
        [{"role": "user", "content": one["prompt"][0]["content"]}] for one in VERL
    ]
    for one, given in zip(found, VERL, strict=True):
        assert one.extras == {name: given[name] for name in ("data_source", "ability", "reward_model", "extra_info")}
        assert one.raw_columns["reward_model.ground_truth"] == one.answer and one.raw_columns["prompts"] == one.messages


def test_a_column_name_with_a_dot_wins_over_nested_values() -> None:
    nested = {"a.b": "whole", "a": {"b": "nested", "b.c": "inner", "b.d": {"e": "deep"}}}
    assert answer_of(row(**nested), "a.b") == "whole"
    assert answer_of(row(a=nested["a"]), "a.b") == "nested"
    assert answer_of(row(**nested), "a.b.c") == "inner"
    assert answer_of(row(**nested), "a.b.d.e") == "deep"
    assert answer_of(row(**{"x.y": {"z": 3}, "x": {"y": 1}}), "x.y.z") == "3"


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ("reward_model.truth", "the keys of reward_model are: ground_truth, style"),
        ("extra_info.teacher.id", "the keys of teacher are: name"),
        ("ability.level", "its ability='MATH' has no keys"),
        ("reward.ground_truth", "its columns are: data_source, prompt, ability, reward_model, extra_info"),
        ("reward_model.", "the keys of reward_model are: ground_truth, style"),
        (".", "its columns are: data_source"),
    ],
)
def test_a_missing_nested_column_is_named_with_the_existing_keys(column: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        answer_of(row(**VERL[0]), column)
    assert str(caught.value).startswith(f"set.jsonl:5: answer_column={column!r} is not a column of this row; {problem}")


def test_text_parts_are_joined_and_null_keys_are_omitted() -> None:
    parts = [{"type": "text", "text": "What\u2028is "}, {"type": "text", "text": "1+1?", "image": None}]
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]
    messages = [
        {"role": "user", "content": parts, "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": [{"type": "text", "text": "2"}], "name": "add"},
    ]
    assert messages_of(row(prompt=messages), "prompt", None) == [
        {"role": "user", "content": "What\u2028is 1+1?"},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "content": "2", "name": "add"},
    ]


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        7,
        True,
        ["text"],
        [{"type": "text", "text": None}],
        [{"type": "text", "text": 3}],
        [{"type": "text"}],
        [{"text": "a"}],
        [{"type": "image", "text": "a"}],
        [{"type": "text", "text": "a", "image": "x.png"}],
        [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
        [[{"type": "text", "text": "a"}]],
    ],
    ids=repr,
)
def test_any_other_content_is_refused_with_its_row(content: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    with pytest.raises(ConfigError, match=r"^set\.jsonl:5: prompt\[1\]\.content.*; correct"):
        messages_of(row(prompt=messages), "prompt", None)


@pytest.mark.parametrize(
    "message", ["a", None, 3, {}, {"content": "a"}, {"role": None, "content": "a"}, {"role": 1, "content": "a"}]
)
def test_a_message_without_a_role_is_refused(message: Any) -> None:
    with pytest.raises(ConfigError, match=r"^set\.jsonl:5: prompt\[0\]=.*role"):
        messages_of(row(prompt=[message]), "prompt", None)


def test_an_assistant_without_text_must_call_a_tool() -> None:
    for calls in (None, [], {}):
        messages = [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "user", "content": "u"}]
        with pytest.raises(ConfigError, match=r"prompt\[0\]\.content=None is neither"):
            messages_of(row(prompt=messages), "prompt", None)
