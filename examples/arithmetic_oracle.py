"""The strict oracle of the quickstart's sums: a reward function that only watches.

With weight 0 it adds nothing to the reward. Its verdicts give the metric `reward/paid_but_wrong`: of the responses that another
reward function calls correct, the share that is not right to the letter. If it rises, the policy has found a way to be paid for
wrong answers.
"""

import re
from typing import Any

from grpo_mega.rewards import Score

TAGS = re.compile(r"</?(?:think|answer)>")


def arithmetic_oracle(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return 1 if nothing but the gold answer, and tags, follows the last "=" of the response; else 0."""
    words = TAGS.sub(" ", response.rpartition("=")[2]).split()
    is_right = bool(words) and set(words) == {answer}
    return Score(float(is_right), "oracle_right" if is_right else "oracle_wrong")
