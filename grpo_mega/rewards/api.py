"""The result of a reward function (Score), and the pool's result for a sample (RewardResult).

A reward function is `(prompt, response, answer, extras, **options) -> float | None | Score`. None, as the result or as
a Score's value, means "does not apply here": the function adds nothing to the sample's reward. A Score may also have
rewards for the steps of the response (DeepSeekMath, arXiv 2402.03300, section 4.1.3), with or without a value. All
numbers must be finite, because one NaN would reach every gradient of its group. A function with TRL's signature
(`registry`) returns a list with one result per sample.

`splitter` finds where the steps of a response end, by the key rewards.step_splitter:

    blank-lines    a step ends with the blank lines after it
    lines          a step is a line
    step-k         a step starts at a line such as "Step 2: ...", "**Step 2**", "### step 2." or "- Step 2)"
    regex:PATTERN  a step ends where a match of PATTERN ends

Together the steps are the whole text. A separator belongs to the step before it. No step is only white space: such a
piece is merged into its neighbour, and a text of only white space has no steps. Time is linear in the length of the
text (for regex:PATTERN, if PATTERN is linear).
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from grpo_mega.config.data import step_separator
from grpo_mega.errors import ConfigError
from grpo_mega.text import well_formed


@dataclass(frozen=True)
class Step:
    """The reward of one step. The step ends after the first `end` characters of the response."""

    end: int
    value: float


@dataclass(frozen=True)
class Score:
    """The value of a reward (None: does not apply), a one-word verdict that says why, and step rewards by ascending
    end.
    """

    value: float | None
    verdict: str
    steps: tuple[Step, ...] = ()

    @property
    def metric(self) -> float | None:
        """Return the value to log: the value, or the mean over the steps if there is no value."""
        if self.value is None and self.steps:
            return sum(step.value for step in self.steps) / len(self.steps)
        return self.value


class NoScore(Exception):
    """Raised if a score is missing through no fault of the response, for example because a server does not answer.

    The sample then gets no score (None) with the verdict "error", and does not train. Any other exception gives the
    score 0.
    """


Extras = dict[str, Any]  # the other columns of a row, and prefill, finish_reason and messages of its sample
RewardFunction = Callable[..., "float | Score | None"]
_INK = re.compile(r"\S")


def as_score(returned: Any, response: str) -> Score:
    """Return the Score for whatever a reward function returned for this response.

    Raises:
        TypeError, ValueError: the result is not None, a Score or a number; a number is not finite; or the step ends are
            not ascending within the response.
    """
    if returned is None:
        return Score(None, "not_applicable")
    if not isinstance(returned, Score):
        returned = Score(returned, "scored")
    value = None if returned.value is None else _number(returned.value, "reward")
    steps = tuple(Step(operator.index(step.end), _number(step.value, "reward of a step")) for step in returned.steps)
    last = 0
    for step in steps:
        if not last < step.end <= len(response):
            raise ValueError(
                f"a step ends at character {step.end}, after one that ends at {last}, in a response of {len(response)};"
                " give the steps by ascending end, each within the response"
            )
        last = step.end
    return Score(value, well_formed(str(returned.verdict)), steps)


@dataclass(frozen=True)
class RewardResult:
    """The outcome of one sample.

    `total` is the weighted sum over the functions that returned a value, times the multiplying functions. It is None if
    there is nothing to sum, or if a score is missing through no fault of the response: without that score the sum would
    be too small, as if the score were 0.

    `scores` are the values; a function that rewards only steps has their mean. `steps` are weighted and ordered by
    ascending end; steps of two functions may end at the same character. A function of weight 0 is only observed, so
    `steps` does not include its steps.
    """

    total: float | None
    scores: dict[str, float | None]
    verdicts: dict[str, str]
    steps: tuple[Step, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)  # exceptions by function


def result_of(
    weights: Mapping[str, float],
    outcomes: Mapping[str, Score],
    errors: Mapping[str, str],
    factors: Collection[str] = (),
) -> RewardResult:
    """Combine the Scores of all functions in `weights`, in their order.

    The functions in `factors` multiply the sum of the others. The sum is 1 if there are no others.
    """
    weighted = {name: w * score.value for name, w in weights.items() if (score := outcomes[name]).value is not None}
    terms = [value for name, value in weighted.items() if name not in factors]
    multiplied = [value for name, value in weighted.items() if name in factors and weights[name]]
    if factors and all(name in factors or not weight for name, weight in weights.items()):
        terms = [1.0] if multiplied else []
    counted = [(weight, step) for name, weight in weights.items() if weight for step in outcomes[name].steps]
    if any(weight and name in errors and outcomes[name].value is None for name, weight in weights.items()):
        terms, counted = [], []
    return RewardResult(
        math.prod(multiplied, start=sum(terms)) if terms else None,
        {name: outcomes[name].metric for name in weights},
        {name: outcomes[name].verdict for name in weights},
        tuple(sorted((Step(step.end, weight * step.value) for weight, step in counted), key=lambda step: step.end)),
        errors,
    )


@lru_cache(maxsize=32)
def splitter(name: str) -> Callable[[str], list[int]]:
    """Return the splitter called `name`: it maps a text to the ascending character ends of its steps.

    Raises ConfigError for an unknown name or an invalid pattern.
    """
    try:
        separator = step_separator(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None

    def split(text: str) -> list[int]:
        ends: list[int] = []
        ink = _INK.search(text)  # first non-space character of the current step
        for match in separator.finditer(text):
            if ink and ink.start() < match.end():
                ends.append(match.end())
                ink = _INK.search(text, match.end())
        if ink:
            ends.append(len(text))
        elif ends:
            ends[-1] = len(text)
        return ends

    return split


def _number(value: Any, name: str) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"the {name} is {type(value).__name__}; return a float, None or a Score")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the {name} is {number}; return a finite number, or None if the function does not apply")
    return number
