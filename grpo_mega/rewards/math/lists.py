"""Pairs, intervals and sets of plain numbers: (1,-2), [0,1/2), \\{1,2,3\\}. Read from normalized answers and compared exactly.

They are compared here only where the verdict is beyond doubt, and so that of math-verify: both sides have the same brackets and
simple numbers that are equal or clearly differ. Lists that math-verify reads in ways of its own are left to it: one element,
equal ends, an interval's ends in descending order, an element twice.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from grpo_mega.rewards.math.numbers import parse_number

_ELEMENT = r"-?(?:\d{1,9}(?:\.\d{1,9})?|\d{1,9}/\d{1,9}|\\[dt]?frac\{\d{1,9}\}\{\d{1,9}\})"
_FORM = re.compile(rf"(?P<open>\(|\[|\\\{{)(?P<elements>{_ELEMENT}(?:, ?{_ELEMENT})+)(?P<close>\)|\]|\\\}})", re.ASCII)
_CLEARLY = Fraction(1, 100_000)  # math-verify rounds to six places


@dataclass(frozen=True)
class NumberList:
    """The values in order, those of a set ascending, and the two brackets."""

    brackets: str
    values: tuple[Fraction, ...]


@lru_cache(maxsize=1024)
def parse_list(text: str) -> NumberList | None:
    """Return the list that the whole of `text` is, or None."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    numbers = [parse_number(element) for element in match["elements"].split(",")]
    values = tuple(number.value for number in numbers if number is not None)
    if len(values) < len(numbers) or len(set(values)) < len(values):
        return None
    brackets = match["open"] + match["close"]
    if brackets == r"\{\}":
        return NumberList(brackets, tuple(sorted(values)))
    is_in_order = len(values) == 2 and values[0] < values[1]
    if brackets == "()" or (brackets in ("[]", "[)", "(]") and is_in_order):
        return NumberList(brackets, values)
    return None


def lists_equal(gold: NumberList, response: NumberList) -> bool | None:
    """Return whether they are the same; None if that is in doubt."""
    if gold.brackets != response.brackets or len(gold.values) != len(response.values):
        return None
    differences = [abs(a - b) for a, b in zip(gold.values, response.values, strict=True)]
    if not any(differences):
        return True
    return False if max(differences) > _CLEARLY else None
