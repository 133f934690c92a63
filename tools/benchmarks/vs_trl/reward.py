"""The reward of benchmarks/vs_trl as a function of ours; the workers import nothing else."""

from typing import Any


def reward(text: str) -> float:
    """Differs within nearly every group, and says nothing."""
    return sum(map(ord, text)) % 7 / 7


def score(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    return reward(response)
