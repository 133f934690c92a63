"""Chats become tokens with a loss mask by turns, as an engine sees them, also if templates change earlier turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken, Qwen2Tokenizer

from grpo_mega.config import DataConfig
from grpo_mega.data.chat import Demonstration, load_demonstrations
from grpo_mega.errors import ConfigError
from tests.helpers.models import CHARACTERS, EOS_ID, SPECIAL_TOKENS, make_tokenizer

USER_ID = SPECIAL_TOKENS.index("<user>")
GENERATION = "{% if add_generation_prompt %}<assistant>{% endif %}"
# Qwen2.5's form: a line break follows the end of a turn.
LINES = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<eos>\n{% endfor %}"
    "{{ '<assistant>\n' if add_generation_prompt }}"
)
# Qwen3 removes the thoughts of turns before the last user message.
STRIPS = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and users[-1] in messages[loop.index0:] %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}"
    "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}" + GENERATION
)
# DeepSeek-R1-Distill opens a thought in the generation prompt, and removes the thoughts of all turns.
OPENS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{{ '<eos>' if m.role == 'assistant' }}"
    "{% endfor %}{{ '<assistant><think>\n' if add_generation_prompt }}"
)
# GLM-4.5 has no end of a turn: the start of the next turn is an eos id.
NO_END = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{% endfor %}" + GENERATION
CHAT = [("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
THOUGHTS = [("user", "q"), ("assistant", "<think>\nt\n</think>\na"), ("user", "r"), ("assistant", "<think>u</think>b")]


def load(
    folder: Path, row: dict[str, Any], template: str = "", tokenizer: Any = None, **settings: Any
) -> Demonstration:
    """Return the only row of a dataset."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = tokenizer or make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    stop_ids = settings.pop("stop_ids", (EOS_ID,))
    config = DataConfig.model_validate({"train": str(folder / "rows.jsonl"), **settings})
    (found,), num_too_long, _ = load_demonstrations(config.train[0], config, tokenizer, stop_ids=stop_ids)
    assert num_too_long == 0
    return found


def marked(row: Demonstration) -> list[str]:
    """Return the text of each segment, with trained parts in brackets."""
    tokenizer, texts = make_tokenizer(), []
    for segment in row.segments:
        text, end = tokenizer.decode(segment.prompt_ids), 0
        for start, stop in segment.trained:
            text += tokenizer.decode(segment.response_ids[end:start])
            text += f"[{tokenizer.decode(segment.response_ids[start:stop])}]"
            end = stop
        assert end == len(segment.response_ids)
        texts.append(text)
    return texts


def chat(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (
            LINES,
            CHAT,
            ["<system>\ns<eos>\n<user>\nq<eos>\n<assistant>\n[a<eos>]\n<user>\nr<eos>\n<assistant>\n[b<eos>]"],
        ),
        (
            STRIPS,
            THOUGHTS,
            [
                "<user>q<assistant>[<think>\nt\n</think>\na<eos>]",
                "<user>q<assistant>a<eos><user>r<assistant>[<think>u</think>b<eos>]",
            ],
        ),
        (
            OPENS,
            THOUGHTS,
            [
                "<user>q<assistant><think>\n[t\n</think>\na<eos>]",
                "<user>q<assistant>\na<eos><user>r<assistant><think>\n[u</think>b<eos>]",
            ],
        ),
        (
            LINES,
            [("user", "q"), ("assistant", "a<eos>\n<user>b")],
            ["<user>\nq<eos>\n<assistant>\n[a<eos>\n<user>b<eos>]"],
        ),
    ],
    ids=["lines", "strips", "opens", "literal end"],
)
def test_each_turn_follows_the_prompt_of_an_engine(
    tmp_path: Path, template: str, turns: list[tuple[str, str]], expected: list[str]
) -> None:
    assert marked(load(tmp_path, chat(*turns), template)) == expected


def test_turns_of_a_prompt_are_given_even_if_they_are_empty(tmp_path: Path) -> None:
    given = [{"role": role, "content": text} for role, text in (("user", "q"), ("assistant", ""), ("user", "r"))]
    [text] = marked(load(tmp_path, {"prompt": given, "completion": "b"}, LINES))
    assert text == "<user>\nq<eos>\n<assistant>\n<eos>\n<user>\nr<eos>\n<assistant>\n[b<eos>]"


def test_a_stop_token_that_starts_the_next_turn_is_trained_once(tmp_path: Path) -> None:
    row = load(tmp_path, chat(*CHAT[1:]), NO_END, stop_ids=(EOS_ID, USER_ID))
    assert marked(row) == ["<user>\nq<assistant>[\na<user>]\nr<assistant>[\nb<user>]"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a"},
        {"question": "q", "response": [{"role": "assistant", "content": "a"}]},
        {"messages": [], "prompt": "q", "completion": "a"},
    ],
)
def test_only_the_completion_of_a_prompt_is_trained(tmp_path: Path, row: dict[str, Any]) -> None:
    settings = {"completion_column": "completion"} if "messages" in row else {}
    assert marked(load(tmp_path, row, **settings)) == ["<user>q<assistant>[a<eos>]"]
    earlier = [{"role": role, "content": text} for role, text in (("user", "p"), ("assistant", "o"), ("user", "q"))]
    found = load(tmp_path, {"prompt": earlier, "completion": "a"}, system_prompt="s")
    assert marked(found) == ["<system>s<user>p<assistant>o<eos><user>q<assistant>[a<eos>]"]


def test_no_token_has_text_of_both_prompt_and_turn(tmp_path: Path) -> None:
    """The tokenizer merges two line breaks, but an engine continues the tokens of its prompt."""
    names = [*SPECIAL_TOKENS, *CHARACTERS, "ĊĊ"]
    tokenizer = Qwen2Tokenizer(
        vocab={name: i for i, name in enumerate(names)}, merges=[("Ċ", "Ċ")], eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    [segment] = load(tmp_path, chat(("user", "q"), ("assistant", "\n\na")), LINES, tokenizer).segments
    prompt = "<user>\nq<eos>\n<assistant>\n"
    assert tokenizer(prompt + "\n\na")["input_ids"][: len(segment.prompt_ids)] != list(segment.prompt_ids)
    assert list(segment.prompt_ids) == tokenizer(prompt)["input_ids"]
    assert list(segment.response_ids) == [names.index("ĊĊ"), names.index("a"), EOS_ID]


@pytest.mark.parametrize(
    ("row", "settings", "expected"),
    [
        (chat(("user", "q"), ("assistant", " ")), {}, "message 1 is an empty assistant message"),
        (chat(("user", "q")), {}, "has no assistant message to train on"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "completion": "b"}, {}, "ends with an assistant message"),
        ({"prompt": "q", "completion": ""}, {}, "completion='' is neither a text nor a list of messages"),
        (chat(("user", "q")), {"messages_column": "chat"}, "messages_column='chat' is not a column of this row"),
        ({"prompt": "q"}, {}, "completion_column is not set, and none of completion, response is among the columns"),
        ({"text": "q"}, {}, "prompt_column is not set, and none of prompt, problem, question is among the columns"),
        (chat(*CHAT), {"max_length": 9}, "data.max_length=9: must hold a row, but drops all 1 of"),
    ],
)
def test_a_row_that_trains_nothing_is_refused_in_one_line(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, row, **settings)
    assert expected in str(caught.value) and "\n" not in str(caught.value), caught.value


def test_a_turn_that_the_template_refuses_or_opens_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"message 1 .*<think>"):
        load(tmp_path, chat(("user", "q"), ("assistant", "a")), OPENS)
    refuses = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no turn') }}{% endif %}" + LINES
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: .*\(no turn\)"):
        load(tmp_path, chat(("user", "q"), ("assistant", "a")), refuses)


def test_long_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = [chat(("user", "q"), ("assistant", "a" * n)) for n in (2, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate({"train": str(tmp_path / "rows.jsonl"), "max_length": 8})
    loaded, num_too_long, note = load_demonstrations(config.train[0], config, make_tokenizer(), stop_ids=())
    assert [row.id for row in loaded] == [0] and num_too_long == 1
    assert "1 rows" in note and "6 tokens, 3 " in note and "1 dropped" in note and note.endswith("«aa<eos>»")
