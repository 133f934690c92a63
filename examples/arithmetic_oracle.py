"""A strict oracle for the quickstart's sums, as a reward function with weight 0.

It adds nothing to the reward. Its verdicts are the source of the metric `reward/paid_but_wrong`: the share of wrong
responses among the responses that another reward function calls correct. If the metric rises, the policy has found a
way to be paid for wrong answers.
"""

import re
from typing import Any

from grpo_mega.rewards import Score

ANSWER = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)


def arithmetic_oracle(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return 1 if the answer that the response states is exactly the gold answer, otherwise 0.

    A thought does not count, because the task asks for an answer after it. The answer is the text in the last complete
    <answer>...</answer>. In a response without answer tags, it is all text after the last "=". Only white space may
    surround it.
    """
    conclusion = response.rpartition("</think>")[2]
    if "<answer>" in conclusion or "</answer>" in conclusion:
        *_, stated = ("", *ANSWER.findall(conclusion))
    else:
        stated = conclusion.rpartition("=")[2]
    is_right = stated.strip() == answer
    return Score(float(is_right), "oracle_right" if is_right else "oracle_wrong")
