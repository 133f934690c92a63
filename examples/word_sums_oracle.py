"""A strict oracle for the word sums of smollm2.sh, as a reward function with weight 0.

It adds nothing to the reward. `eval/word_sums_oracle` is the strict held-out accuracy, and its verdicts are the source
of the metric `reward/paid_but_wrong`.
"""

import re
from typing import Any

from grpo_mega.rewards import Score

NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def word_sums_oracle(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return 1 if the response ends with the gold answer and states no other result, otherwise 0.

    Every number after the last "=" must be the gold answer, and there must be one. In a response without "=", every
    number of the response counts. A response that was cut at the length limit is unfinished, so it is wrong.
    """
    numbers = set(NUMBER.findall(response.rpartition("=")[2]))
    is_right = numbers == {answer} and extras.get("finish_reason") != "length"
    return Score(float(is_right), "oracle_right" if is_right else "oracle_wrong")
