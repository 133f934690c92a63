"""load_prompts: rows become rendered, tokenized prompts. The error for a bad row names its line and the remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_mega.config import DataConfig
from grpo_mega.data import load_prompts
from grpo_mega.errors import ConfigError
from grpo_mega.types import Prompt

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
PLAIN = TURNS + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
OPENS_THOUGHT = TURNS + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"


def make_tokenizer(chat_template: str | None) -> PreTrainedTokenizerFast:
    """Return a character-level tokenizer. It prepends <bos> if special tokens are requested."""
    characters = ["<unk>", "<bos>", *map(chr, range(32, 127)), "\n"]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r".|\n"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", chat_template=chat_template, name_or_path="tiny"
    )


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, template: str | None = PLAIN, **changes: Any) -> tuple[list[Prompt], int, str]:
    settings: dict[str, Any] = {
        "prompt_column": "prompt",
        "answer_column": "answer",
        "system_prompt": None,
        "max_prompt_length": 200,
    }
    first_id = changes.pop("first_id", 0)
    config = DataConfig.model_validate({"train": str(path)} | settings | changes)
    return load_prompts(config.train[0], config, make_tokenizer(template), first_id=first_id)


def test_a_text_becomes_a_user_message_rendered_by_the_template(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "1+1=?", "answer": "2", "level": "easy"}])
    [prompt], _, note = load(path)
    assert prompt.text == "<|user|>1+1=?<|end|><|assistant|>"
    assert make_tokenizer(PLAIN).decode(prompt.token_ids).replace(" ", "") == prompt.text
    assert len(prompt.token_ids) == len(prompt.text)  # no token is added, such as <bos>
    assert (prompt.id, prompt.answer, prompt.prefill, prompt.extras) == (0, "2", "", {"level": "easy"})
    assert note.startswith(f"{path}: 1 prompts ") and "33" in note


def test_messages_are_kept_and_the_system_prompt_goes_before_them(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": messages, "answer": 7}])
    [prompt], *_ = load(path, system_prompt="be brief")
    turns = "<|system|>be brief<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|>"
    assert prompt.text == turns + "<|assistant|>"
    assert prompt.answer == "7"


def test_long_prompts_are_dropped_and_counted_but_ids_stay_line_indices(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (5, 90, 7, 91, 9)]
    prompts, num_too_long, note = load(write_rows(tmp_path / "a.jsonl", rows), max_prompt_length=60)
    assert [prompt.id for prompt in prompts] == [0, 2, 4]
    assert (len(prompts), num_too_long) == (3, 2)
    assert note.endswith("3 prompts of at most 37 tokens, 2 dropped as too long")


def test_ids_count_from_the_sets_first_id(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    assert [prompt.id for prompt in load(path, first_id=1000)[0]] == [1000, 1001]


@pytest.mark.parametrize(
    ("row", "given", "answer"),
    [
        ({"answer": "1", "solution": "2"}, None, "1"),
        ({"solution": "2"}, None, "2"),
        ({"answer": "1", "solution": "2"}, "solution", "2"),
        ({"answer": "1", "gold": 3.5}, "gold", "3.5"),
    ],
)
def test_the_answer_column_is_the_given_one_else_answer_else_solution(
    tmp_path: Path, row: dict[str, Any], given: str | None, answer: str
) -> None:
    [prompt], *_ = load(write_rows(tmp_path / "a.jsonl", [{"prompt": "a"} | row]), answer_column=given)
    assert prompt.answer == answer
    assert set(prompt.extras) == {column for column, value in row.items() if str(value) != answer}


def test_without_answer_or_solution_the_columns_are_listed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "gold": "1"}])
    with pytest.raises(
        ConfigError,
        match=r"answer, solution, reward_model.ground_truth .*prompt, gold; set data\.answer_column",
    ):
        load(path, answer_column=None)


def test_blank_lines_are_skipped_but_counted_in_the_ids(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", "answer": "2"}\n')
    assert [prompt.id for prompt in load(path)[0]] == [0, 2]


QWEN_LIKE = (  # writes an empty thought only into the last assistant turn
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
)
ALWAYS_THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
CLOSES_THOUGHT_IN_HISTORY = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}</think>{% endif %}{{ m.content }}{% endfor"
    " %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
NO_GENERATION_PROMPT = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %} {{ m.content }}</s>"
)
NO_GENERATION_PROMPT += "{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "prefill"),
    [
        pytest.param(PLAIN, "", id="header-alone"),
        pytest.param(OPENS_THOUGHT, "<think>\n", id="opens-a-thought"),
        pytest.param(QWEN_LIKE + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}", "", id="qwen3"),
        pytest.param(
            QWEN_LIKE + "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}",
            "<think>\n",
            id="qwen3-thinking",
        ),
        pytest.param(
            QWEN_LIKE + "{% if add_generation_prompt %}<|assistant|>\n<think>\n\n</think>\n\n{% endif %}",
            "<think>\n\n</think>\n\n",
            id="thought-closed-by-the-template",
        ),
        pytest.param(ALWAYS_THINKS, "<think>\n", id="thought-in-every-turn"),
        pytest.param(CLOSES_THOUGHT_IN_HISTORY, "<think>", id="thought-closed-in-history"),
        pytest.param(NO_GENERATION_PROMPT, "", id="no-generation-prompt"),
    ],
)
def test_the_prefill_is_the_generation_prompt_after_the_assistant_header(
    tmp_path: Path, template: str, prefill: str
) -> None:
    [prompt], *_ = load(write_rows(tmp_path / "a.jsonl", [{"prompt": "hi", "answer": "1"}]), template)
    assert prompt.prefill == prefill
    assert prompt.text.endswith(prefill)


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ('{"prompt": "a"', "a.jsonl:1 is not JSON"),
        ("[1, 2]", "a.jsonl:1 holds a JSON list, not an object"),
        (
            '{"query": "a", "answer": "1"}',
            "prompt_column='prompt' is not a column of this row; its columns are: query",
        ),
        (
            '{"prompt": "a", "solution": "1"}',
            "answer_column='answer' is not a column of this row; its columns are: prompt",
        ),
        (json.dumps(GOOD) + '\n{"prompt": "a", "answer": null}', "a.jsonl:2: answer=None is not an answer"),
        ('{"prompt": "a", "answer": " "}', "answer=' ' is not an answer"),
        ('{"prompt": "a", "answer": true}', "answer=True is not an answer"),
        ('{"prompt": 3, "answer": "1"}', "prompt=3 is neither a text nor a list of messages"),
        (
            '{"prompt": [{"role": "user"}], "answer": "1"}',
            "prompt[0].content=None is neither a text nor a list of text parts",
        ),
        ('{"prompt": ["hi"], "answer": "1"}', "prompt[0]='hi' is not a message with role and content"),
        ('{"prompt": [], "answer": "1"}', "prompt=[] is neither a text nor a list of messages"),
        ('{"prompt": [{"role": "assistant", "content": "a"}], "answer": "1"}', "prompt ends with an assistant message"),
    ],
)
def test_a_bad_row_names_its_place_and_the_remedy_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_limit_that_drops_every_prompt_names_the_shortest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_prompt_length=4 .*29 tokens"):
        load(write_rows(tmp_path / "a.jsonl", [GOOD]), max_prompt_length=4)


def test_two_system_messages_are_an_error(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "answer": "1"}
    with pytest.raises(ConfigError, match=r"data\.system_prompt"):
        load(write_rows(tmp_path / "a.jsonl", [row]), system_prompt="t")


def test_a_tokenizer_without_a_chat_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tiny' .*; add chat_template"):
        load(write_rows(tmp_path / "a.jsonl", [GOOD]), template=None)


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: .*\(no system role\)"):
        load(write_rows(tmp_path / "a.jsonl", [GOOD]), template=refusing, system_prompt="s")
