"""The format reward: check that the whole response is `<think>...</think>` and then `<answer>...</answer>`.

Each tag must occur exactly once, in this order. Thought and answer may span lines and may be empty. Only white space may stand
between and after them. The score is 1.0 with the verdict "well_formed", else 0.0 with "malformed". If the chat template has
already opened the assistant's turn, extras["prefill"] is that text (for example "<think>\\n"), and prefill + response is
scored.

soft_format and tag_count are the lenient versions, for a model that first has to learn the format.
"""

import re
from typing import Any

from grpo_mega.rewards.api import Score
from grpo_mega.rewards.math.answer import whole_turn

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_ON_OWN_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_ANSWER_AFTER_THOUGHT = re.compile(r"</think>\s*<answer>")


def format_reward(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return Score(1.0, "well_formed") or Score(0.0, "malformed"). Time is linear in the length of the response."""
    prefill = str(extras.get("prefill") or "").lstrip()  # leading white space belongs to the template, not to the model
    if is_well_formed(prefill + response):
        return Score(1.0, "well_formed")
    return Score(0.0, "malformed")


def soft_format(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return 1 if a thought ends and, after white space only, a complete answer follows. Other text may surround them."""
    turn = whole_turn(response, extras)
    found = _ANSWER_AFTER_THOUGHT.search(turn)
    is_there = found is not None and "</answer>" in turn[found.end() :]
    return Score(1.0, "well_formed") if is_there else Score(0.0, "malformed")


def tag_count(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    """Return a quarter for each of the four tags that occurs exactly once and on a separate line, like open-r1's function."""
    turn = whole_turn(response, extras)
    return sum(turn.count(tag) == 1 for tag in _ON_OWN_LINES) / len(_ON_OWN_LINES)


def is_well_formed(text: str) -> bool:
    """Return whether `text` is one thought and one answer, and nothing else.

    The search uses fixed strings only, because a regular expression backtracks over every tag that a response repeats.
    """
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    think, end_think, answer, end_answer = (text.index(tag) for tag in TAGS)
    if not think == 0 < end_think < answer < end_answer:
        return False
    between = text[end_think + len("</think>") : answer]
    after = text[end_answer + len("</answer>") :]
    return not between.strip() and not after.strip()
