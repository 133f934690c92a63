"""The result of a reward function (Score), and the pool's result for a sample (RewardResult).

A reward function is `(prompt, response, answer, extras, **options) -> float | None | Score`. None, as the result or as a
Score's value, means "does not apply here": the function then adds nothing to the sample's reward. A Score may also have
rewards for the steps of the response (DeepSeekMath, arXiv 2402.03300, section 4.1.3), beside a value or in its place. All
numbers must be finite, since one NaN would reach every gradient of its group. A function of TRL's signature (groups.py) returns
a list of these, one per sample.
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_mega.text import well_formed


@dataclass(frozen=True)
class Step:
    """The reward of one step, which ends after the first `end` characters of the response."""

    end: int
    value: float


@dataclass(frozen=True)
class Score:
    """A reward's value (None: does not apply), the one word that says why, and rewards of steps by ascending end."""

    value: float | None
    verdict: str
    steps: tuple[Step, ...] = ()

    @property
    def metric(self) -> float | None:
        """Return the value that is logged: the value, else the mean over the steps."""
        if self.value is None and self.steps:
            return sum(step.value for step in self.steps) / len(self.steps)
        return self.value


class NoScore(Exception):
    """Raised where a score is missing through no fault of the response, such as when a server does not answer.

    The sample then has no score (None) with the verdict "error", and does not train; any other exception costs it the score: 0.
    """


RewardFunction = Callable[..., "float | Score | None"]


def as_score(returned: Any, response: str) -> Score:
    """Return the Score for whatever a reward function returned for this response.

    Raises:
        TypeError, ValueError: it is neither None, nor a Score, nor a number; a number is not finite; or the steps do not end in
            the response, one after the other.
    """
    if returned is None:
        return Score(None, "not_applicable")
    if not isinstance(returned, Score):
        returned = Score(_number(returned, "reward"), "scored")
    value = None if returned.value is None else _number(returned.value, "reward")
    steps = tuple(Step(operator.index(step.end), _number(step.value, "reward of a step")) for step in returned.steps)
    last = 0
    for step in steps:
        if not last < step.end <= len(response):
            raise ValueError(
                f"a step ends at character {step.end}, after one that ends at {last}, in a response of {len(response)}; "
                "give the steps by ascending end, each within the response"
            )
        last = step.end
    return Score(value, well_formed(str(returned.verdict)), steps)


@dataclass(frozen=True)
class RewardResult:
    """The outcome of one sample.

    `total` is the weighted sum over the functions that gave a value, times those that multiply. It is None if nothing is
    summed, and if a score is missing through no fault of the response: without it the sum is too small, as with a score of 0.

    `scores` are the values, and for a function that rewarded steps alone the mean over them. `steps` are weighted, by ascending
    end; those of two functions may end at the same place. A function of weight 0 is only watched: its steps are not among them.
    """

    total: float | None
    scores: dict[str, float | None]
    verdicts: dict[str, str]
    steps: tuple[Step, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # the exceptions that were raised, by function


def result_of(
    weights: Mapping[str, float], outcomes: Mapping[str, Score], errors: Mapping[str, str], factors: Collection[str] = ()
) -> RewardResult:
    """Combine the Scores of all functions in `weights`, which gives the order.

    Those of `factors` multiply the sum of the others; the sum is 1 where there are no others.
    """
    missing = [name for name in weights if name in errors and outcomes[name].value is None]
    weighted = {name: w * score.value for name, w in weights.items() if (score := outcomes[name]).value is not None}
    terms = [value for name, value in weighted.items() if name not in factors]
    multiplied = [value for name, value in weighted.items() if name in factors and weights[name]]
    if factors and all(name in factors or not weight for name, weight in weights.items()):
        terms = [1.0] if multiplied else []
    counted = [(weight, step) for name, weight in weights.items() if weight for step in outcomes[name].steps]
    if any(weights[name] for name in missing):
        terms, counted = [], []
    return RewardResult(
        math.prod(multiplied, start=sum(terms)) if terms else None,
        {name: outcomes[name].metric for name in weights},
        {name: outcomes[name].verdict for name in weights},
        tuple(sorted((Step(step.end, weight * step.value) for weight, step in counted), key=lambda step: step.end)),
        errors,
    )


def _number(value: Any, name: str) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"the {name} is {type(value).__name__}; return a float, None or a Score")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the {name} is {number}; return a finite number, or None where the function does not apply")
    return number
