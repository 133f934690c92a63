"""A strict oracle for the quickstart's sums, as a reward function with weight 0.

It adds nothing to the reward. Its verdicts are the source of the metric `reward/paid_but_wrong`: the share of wrong responses
among the responses that another reward function calls correct. If the metric rises, the policy has found a way to be paid for
wrong answers.
"""

import re
from typing import Any

from grpo_mega.rewards import Score

ANSWER = re.compile(r"<answer>(?P<text>(?:(?!</?answer>).)*)</answer>", re.DOTALL)
THOUGHT = re.compile(r"</?think>")


def arithmetic_oracle(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return 1 if the last complete <answer>...</answer> is the gold answer, otherwise 0.

    In a response without answer tags, the gold answer must follow the last "=", and nothing else except tags of the thought.
    White space around the answer does not matter.
    """
    if "<answer>" in response or "</answer>" in response:
        *_, text = ("", *(match["text"] for match in ANSWER.finditer(response)))
        is_right = text.strip() == answer
    else:
        words = THOUGHT.sub(" ", response.rpartition("=")[2]).split()
        is_right = bool(words) and set(words) == {answer}
    return Score(float(is_right), "oracle_right" if is_right else "oracle_wrong")
