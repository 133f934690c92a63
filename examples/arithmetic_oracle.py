"""A strict oracle for the quickstart's sums, as a reward function with weight 0.

It adds nothing to the reward. Its verdicts are the source of the metric `reward/paid_but_wrong`: the share of wrong responses
among the responses that another reward function calls correct. If the metric rises, the policy has found a way to be paid for
wrong answers.
"""

import re
from typing import Any

from grpo_mega.rewards import Score

TAGS = re.compile(r"</?(?:think|answer)>")


def arithmetic_oracle(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return 1 if only the gold answer and tags follow the last "=" of the response, otherwise 0."""
    words = TAGS.sub(" ", response.rpartition("=")[2]).split()
    is_right = bool(words) and set(words) == {answer}
    return Score(float(is_right), "oracle_right" if is_right else "oracle_wrong")
