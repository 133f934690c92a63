"""The reward of benchmarks/vs_trl, in a separate file so that reward workers import nothing else."""

from typing import Any


def reward(text: str) -> float:
    """Return a meaningless reward that differs within nearly every group."""
    return sum(map(ord, text)) % 7 / 7


def score(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    return reward(response)
