"""The format reward, compared with a table and an equivalent regular expression, and its time on adversarial text."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.rewards.api import Score
from grpo_mega.rewards.shaping import format_reward

TAGS = ("<think>", "</think>", "<answer>", "</answer>")

WELL_FORMED = [
    "<think>a</think><answer>b</answer>",
    "<think>\n1+1=2\n2+2=4\n</think>\n\n<answer>\n4\n</answer>\n",
    "<think></think><answer></answer>",
    "<think>a < b > c</think> \t<answer>x</answer>  ",
]
MALFORMED = [
    "",
    "4",
    "<answer>4</answer>",
    "<think>a</think>",
    "<think>a</think>4",
    " <think>a</think><answer>b</answer>",
    "So <think>a</think><answer>b</answer>",
    "<think>a</think> so <answer>b</answer>",
    "<think>a</think><answer>b</answer> done",
    "<think>a</think><answer>b</answer><answer>c</answer>",
    "<think>a</think><think>a</think><answer>b</answer>",
    "<think>a<answer>b</answer></think>",
    "<answer>b</answer><think>a</think>",
    "<think>a</think><answer>b",
    "<think>a<think>b</think><answer>c</answer>",
    "<think>a</think></think><answer>c</answer>",
    "<THINK>a</THINK><ANSWER>b</ANSWER>",
    "</think><think><answer>b</answer>",
]


@pytest.mark.parametrize("response", WELL_FORMED)
def test_one_thought_and_one_answer_are_well_formed(response: str) -> None:
    assert format_reward("", response, "", {}) == Score(1.0, "well_formed")


@pytest.mark.parametrize("response", MALFORMED)
def test_anything_else_is_malformed(response: str) -> None:
    assert format_reward("", response, "", {}) == Score(0.0, "malformed")


@pytest.mark.parametrize("prefill", ["<think>\n", "\n<think>", "<think>\n\n</think>\n\n"])
def test_tags_opened_by_the_chat_template_are_scored_too(prefill: str) -> None:
    response = "<answer>b</answer>" if "</think>" in prefill else "a\n</think>\n<answer>b</answer>"
    assert format_reward("", response, "", {"prefill": prefill}) == Score(1.0, "well_formed")
    assert format_reward("", response, "", {}) == Score(0.0, "malformed")
    assert format_reward("", "<think>" + response, "", {"prefill": prefill}) == Score(0.0, "malformed")


def is_well_formed(text: str) -> bool:
    return format_reward("", text, "", {}).value == 1.0


@settings(max_examples=300, derandomize=True)
@given(st.lists(st.sampled_from([*TAGS, " ", "\n", "x"]), max_size=8).map("".join))
def test_it_agrees_with_the_regular_expression(text: str) -> None:
    once = all(text.count(tag) == 1 for tag in TAGS)
    twin = re.fullmatch(r"<think>.*?</think>\s*<answer>.*?</answer>\s*", text, re.DOTALL) is not None
    assert is_well_formed(text) == (once and twin)


@pytest.mark.parametrize("piece", [*TAGS, "<", " ", "<think>a</think>", "<answer>"])
def test_it_takes_linear_time_on_adversarial_text(piece: str) -> None:
    text = "<think>" + piece * (1_000_000 // len(piece)) + "</think><answer>" + " " * 1_000_000
    started = time.process_time()
    assert not is_well_formed(text)
    assert time.process_time() - started < 1.0
