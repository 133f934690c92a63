"""The reward of a response's steps by their arithmetic: 1 for a step whose equations all hold, 0 for one where one does not.

A step without equations has no reward of its own. What is read as an equation is said in `equations`. Verdicts: "steps_right",
"steps_wrong" (one or more) and "no_steps" (no step has an equation).
"""

from typing import Any

from grpo_mega.rewards.api import Score, Step
from grpo_mega.rewards.equations import equations_hold
from grpo_mega.rewards.steps import splitter


def arithmetic_steps(
    prompt: str, response: str, answer: str, extras: dict[str, Any], *, step_splitter: str = "blank-lines"
) -> Score:
    """Rewards of the steps alone; linear in the length of the response."""
    steps: list[Step] = []
    start = 0
    for end in splitter(step_splitter)(response):
        holds = equations_hold(response[start:end])
        if holds is not None:
            steps.append(Step(end, float(holds)))
        start = end
    if not steps:
        return Score(None, "no_steps")
    return Score(None, "steps_right" if all(step.value for step in steps) else "steps_wrong", tuple(steps))
