"""A reward with two values, equal over a whole group now and then."""

from typing import Any


def right_for_a_third(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    return float(sum(map(ord, response)) % 3 == 0)
