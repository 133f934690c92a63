"""Reward functions with TRL's signature. tests/rewards/test_groups.py names them by their dotted paths."""

import json
import re
import time
from typing import Any

from grpo_mega.rewards.api import Score


def accuracy_reward(completions, solution, **kwargs):  # type: ignore[no-untyped-def]
    """Score accuracy like the examples for open-r1."""
    from math_verify import parse, verify

    rewards = []
    for content, sol in zip([completion[0]["content"] for completion in completions], solution, strict=True):
        try:
            rewards.append(float(verify(parse(content), parse(sol))))
        except Exception:
            rewards.append(0.0)
    return rewards


def format_reward(completions, **kwargs):  # type: ignore[no-untyped-def]
    """Score the format like the examples for open-r1."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    return [1.0 if re.match(pattern, completion[0]["content"]) else 0.0 for completion in completions]


class Heard:
    """A callable class instead of a function, created without arguments. Its verdicts contain all arguments it got."""

    def __init__(self, args: object = None) -> None:
        self._calls = 0

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[Score]:
        self._calls += 1
        heard = kwargs | {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
            "call": self._calls,
        }
        return [Score(float(i), json.dumps(heard)) for i in range(len(completions))]


def chosen(completions: list[str], level: list[str], unit: str = "m") -> list[float]:
    """Take only two columns. `unit` is a column or an option."""
    return [float(len(completion)) if unit == "cm" else -1.0 for completion in completions]


async def obey(completions: list[str], **kwargs: Any) -> Any:
    """Do what the first completion says."""
    deed = completions[0]
    if deed == "take long":
        time.sleep(0.2 * len(completions))
    elif deed == "hang":
        time.sleep(600)
    elif deed == "raise":
        raise KeyError("no such column")
    rewards: list[Any] = [0.5, None, *(float(len(text)) for text in completions[2:])]
    if deed == "be short":
        return rewards[1:]
    return [*rewards[:-1], "1.0"] if deed == "give text" else rewards


def paid_if_finished(completions: list[str], finish_reason: list[str]) -> list[float]:
    """Take only the finish reason besides the completions."""
    return [float(reason == "stop") for reason in finish_reason]
