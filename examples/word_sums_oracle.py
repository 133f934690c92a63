"""A strict oracle for the word sums of smollm2.sh, as a reward function with weight 0.

It adds nothing to the reward. `eval/word_sums_oracle.py:word_sums_oracle` is the strict held-out accuracy, and its
verdicts are the source of the metric `reward/paid_but_wrong`.
"""

import re
from typing import Any

from grpo_mega.rewards import Score

NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")
RESULT = re.compile(r"(?:=|\bequals|\bis) *(-?\d+(?:[.,]\d+)*)(?![.,]?\d| *[-+*/=])")
UNFINISHED = re.compile(r"[-+*/=]\s*$")


def word_sums_oracle(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return 1 if the response states the gold answer as its only result, otherwise 0.

    A result is a number directly after "=", "equals" or "is", without a further operation. All results and all numbers
    after the last result must be the gold answer. In a response without a result, all numbers must be the gold answer,
    and there must be one. A response that ends in an operator or was cut at the length limit is unfinished and wrong.
    """
    results = list(RESULT.finditer(response))
    stated = {match[1] for match in results} | set(
        NUMBER.findall(response[results[-1].end() :] if results else response)
    )
    is_finished = extras.get("finish_reason") != "length" and not UNFINISHED.search(response)
    is_right = stated == {answer} and is_finished
    return Score(float(is_right), "oracle_right" if is_right else "oracle_wrong")
