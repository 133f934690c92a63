"""What a reward function returns, and how the pool reads it.

A reward function is `(prompt, response, answer, extras) -> float | None | Score`. None, as the result or as a Score's value,
means "does not apply here": the function then adds nothing to the sample's total. A value must be finite, since one NaN
would reach every gradient of its group.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Score:
    """A reward's value (None: does not apply) and the one word that says why."""

    value: float | None
    verdict: str


RewardFunction = Callable[[str, str, str, dict[str, Any]], "float | Score | None"]


def as_score(returned: Any) -> Score:
    """The Score for whatever a reward function returned.

    Raises:
        TypeError, ValueError: it is neither None, nor a Score, nor a number; or it is not finite.
    """
    if returned is None:
        return Score(None, "not_applicable")
    if not isinstance(returned, Score):
        returned = Score(_number(returned), "scored")
    if returned.value is None:
        return Score(None, str(returned.verdict))
    value = _number(returned.value)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}; return a finite number, or None where the function does not apply")
    return Score(value, str(returned.verdict))


def _number(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"the reward is {type(value).__name__}; return a float, None or a Score")
    return float(value)
