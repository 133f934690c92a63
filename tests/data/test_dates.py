"""Chat templates that write the date: the same held-out prompts and pass rates on every day, and one date per run."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from grpo_mega.config.data import DataConfig
from grpo_mega.data.chat import find_prefill, load_demonstrations, set_date
from grpo_mega.data.load import BY_TEXT, RunData, load_data, text_hash
from tests.helpers.models import CHAT_TEMPLATE, make_tokenizer

DATED = "{{ strftime_now('%d %b %Y %H:%M:%S') }} " + CHAT_TEMPLATE
LLAMA = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }} "
    + CHAT_TEMPLATE
)
QUESTIONS = [f"{i} apples" for i in range(37)]

SetClock = Callable[[int], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Return a function that sets the day of transformers' clock, which advances by a second per look."""

    class Clock(dt.datetime):
        day, num_looks = 1, 0

        @classmethod
        def now(cls, tz: Any = None) -> dt.datetime:  # type: ignore[override]
            cls.num_looks += 1
            return dt.datetime(2026, 1, cls.day, 12) + dt.timedelta(seconds=cls.num_looks)

    def set_day(day: int) -> None:
        Clock.day = day

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    chat_template_utils._compile_jinja_template.cache_clear()
    return set_day


def load(folder: Path, prompts: list[Any], template: str, split: str = "prompt", **settings: Any) -> RunData:
    rows = [{"prompt": prompt, "answer": "1", "completion": "a"} for prompt in prompts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    config = {"train": str(folder / "rows.jsonl"), "max_prompt_length": 200, "heldout_size": 7, **settings}
    return load_data(DataConfig.model_validate(config), tokenizer, split=split)


def hash_of_question(number: int) -> bytes:
    text = f'[{{"content": "{QUESTIONS[number]}", "role": "user"}}]'
    return hashlib.sha256(text.encode()).digest()


@pytest.mark.parametrize("template", [DATED, LLAMA], ids=["seconds", "date_string"])
def test_held_out_prompts_are_those_of_the_rows_on_every_day(
    tmp_path: Path, set_clock: SetClock, template: str
) -> None:
    """Messages with keys that a Parquet file fills in, a system prompt and the day change nothing."""
    expected = sorted(range(37), key=hash_of_question)[:7]
    message = {"name": None, "role": "user"}
    chats = [[{**message, "content": text}] for text in QUESTIONS]
    for day, prompts, settings in [(1, QUESTIONS, {}), (2, chats, {}), (3, QUESTIONS, {"system_prompt": "Be brief"})]:
        set_clock(day)
        data = load(tmp_path, prompts, template, **settings)
        assert [p.id for p in data.heldout_sets[""]] == expected
        assert {p.id for p in data.train} == {*range(37)} - {*expected}
        assert f"0{day} Jan 2026" in data.train[0].text


def test_rows_with_one_rendering_stay_on_one_side(tmp_path: Path) -> None:
    """The template strips spaces, so two of three rows are copies for the model."""
    rows = [f"{text}{spaces}" for spaces in ("", " ", "\n") for text in QUESTIONS]
    data = load(tmp_path, rows, CHAT_TEMPLATE.replace("['content']", "['content'] | trim"))
    held = {p.text for p in data.heldout_sets[""]}
    assert len(held) == len(data.heldout_sets[""]) == 7
    assert len(data.train) == 90 and not held & {p.text for p in data.train}


def test_a_run_of_an_earlier_version_keeps_the_split_by_its_texts(tmp_path: Path) -> None:
    data = load(tmp_path, QUESTIONS, CHAT_TEMPLATE, split=BY_TEXT)
    texts = [f"<user>{text}<assistant>" for text in QUESTIONS]
    expected = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())[:7]
    assert [p.text for p in data.heldout_sets[""]] == expected


def test_demonstrations_and_prompts_have_one_split(tmp_path: Path) -> None:
    prompts = load(tmp_path, QUESTIONS, CHAT_TEMPLATE)
    config = DataConfig.model_validate({"train": str(tmp_path / "rows.jsonl"), "heldout_size": 7})

    def load_chats(*arguments: Any, **options: Any) -> Any:
        return load_demonstrations(*arguments, stop_ids=(), **options)

    chats = load_data(config, make_tokenizer(), load_chats)
    assert [p.id for p in chats.heldout_sets[""]] == [p.id for p in prompts.heldout_sets[""]]


def test_pass_rates_of_one_day_count_on_the_next(tmp_path: Path, set_clock: SetClock) -> None:
    found = []
    for day in (1, 2):
        set_clock(day)
        data = load(tmp_path, QUESTIONS, DATED, heldout_size=None)
        rates = [
            {"id": p.id, "hash": text_hash(p.undated or p.text), "samples": 2, "solved": p.id % 2} for p in data.train
        ]
        (tmp_path / f"rates-{day}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rates))
        rated = {"pass_rates": str(tmp_path / "rates-1.jsonl"), "max_pass_rate": 0.3}
        found.append([p.id for p in load(tmp_path, QUESTIONS, DATED, **rated).train])
    assert found[0] == found[1] and all(number % 2 == 0 for number in found[0])
    with pytest.raises(Exception, match=r"data\.pass_rates=.*; evaluate"):
        load(tmp_path, QUESTIONS, DATED, system_prompt="Be brief", **rated)


def test_a_template_without_the_date_keeps_the_hash_of_its_text(tmp_path: Path) -> None:
    assert {p.undated for p in load(tmp_path, QUESTIONS, CHAT_TEMPLATE).train} == {""}


def test_two_renderings_of_a_run_have_the_same_second(tmp_path: Path, set_clock: SetClock) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if strftime_now is defined %}" + DATED + "{% endif %}"
    set_date(tokenizer, "2024-02-29T07:08:09")
    messages = [{"role": "user", "content": "q"}]
    texts = {tokenizer.apply_chat_template(messages, tokenize=False) for _ in range(3)}
    assert texts == {"29 Feb 2024 07:08:09 <user>q"}
    assert find_prefill(tokenizer) == ""
