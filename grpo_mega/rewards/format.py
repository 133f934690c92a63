"""The format reward: check that the whole response is `<think>...</think>` and then `<answer>...</answer>`.

Exactly one of each tag, in this order; thought and answer may span lines and may be empty; between and after them only
white space. 1.0 with the verdict "well_formed", else 0.0 with "malformed". Where the chat template has already opened
the assistant's turn, extras["prefill"] is that text (for example "<think>\\n"), and prefill + response is what is scored.
"""

from typing import Any

from grpo_mega.rewards.api import Score

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return Score(1.0, "well_formed") or Score(0.0, "malformed"); linear in the length of the response."""
    prefill = str(extras.get("prefill") or "").lstrip()  # its leading white space is the template's, not the model's
    if is_well_formed(prefill + response):
        return Score(1.0, "well_formed")
    return Score(0.0, "malformed")


def is_well_formed(text: str) -> bool:
    """Return whether `text` is one thought and one answer, and nothing else.

    It searches for fixed strings only: a regular expression backtracks over every tag that a response repeats.
    """
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    think, end_think, answer, end_answer = (text.index(tag) for tag in TAGS)
    if not think == 0 < end_think < answer < end_answer:
        return False
    between = text[end_think + len("</think>") : answer]
    after = text[end_answer + len("</answer>") :]
    return not between.strip() and not after.strip()
