"""Plain numbers, read from normalized answers and compared exactly.

Input: text of `answer.normalize_answer`. A plain number is an integer, decimal (0.5, .5, 1.5e3, 1.5\\times10^{3}), fraction
(1/2, \\frac{1}{2}), mixed number (1 1/2, 1\\frac{1}{2}) or repeating decimal (0.\\overline{3}), with an optional sign and an
optional percent sign. Exact, because math-verify rounds decimals to six places: it takes 1e-7 for 2e-7.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_DIGITS = 1000  # of an integer that is worth arithmetic; int() refuses 4,300
ROUNDED_DECIMALS = 6  # a decimal with at least so many places may stand for a number that it rounds, as in math-verify
ROUNDED_DIGITS = 4  # ... if it also has so many significant digits: 0.000001 does not stand for 0.0000014

_SIGN = r"(?P<sign>[-+]?) ?"
_FRAC = r"\\[dtc]?frac(?: ?\{ ?(?P<n>-?\d+) ?\} ?\{ ?(?P<d>\d+) ?\}| ?(?P<n1>\d) ?(?P<d1>\d))"
_FORMS = tuple(
    re.compile(_SIGN + form, re.ASCII)
    for form in (
        r"(?P<decimal>\d+\.?\d*|\.\d+)(?:[eE](?P<e>[-+]?\d{1,3})| ?(?:\\times|\\cdot|\*) ?10 ?\^ ?\{?(?P<t>-?\d{1,3})\}?)?",
        r"10 ?\^ ?\{? ?(?P<power>-?\d{1,3}) ?\}?",
        r"(?:(?P<whole>\d+) )?(?P<n>\d+) ?/ ?(?P<d>\d+)",
        r"(?:(?P<whole>\d+) ?)?" + _FRAC,
        r"(?P<lead>\d*\.\d*)\\overline ?\{(?P<repeat>\d+)\}",
    )
)


@dataclass(frozen=True)
class PlainNumber:
    """The exact value (for a percentage the value before the sign: 50 for 50%)."""

    value: Fraction
    decimals: int  # places after the point, 0 for integers and fractions
    is_percent: bool


@lru_cache(maxsize=1024)
def parse_number(text: str) -> PlainNumber | None:
    """The plain number that the whole of `text` is, or None."""
    if len(text) > MAX_DIGITS:
        return None
    core = text.strip()
    is_percent = core.endswith("%")
    core = core.removesuffix("%").strip()
    while len(core) > 2 and (core[0], core[-1]) in (("(", ")"), ("{", "}")):
        core = core[1:-1].strip()
    for form in _FORMS:
        if match := form.fullmatch(core):
            found = {name: group for name, group in match.groupdict().items() if group is not None}
            value, decimals = _value(found)
            if value is None:
                return None
            return PlainNumber(-value if found["sign"] == "-" else value, decimals, is_percent)
    return None


def numbers_equal(gold: PlainNumber, response: PlainNumber) -> bool:
    """Whether two plain numbers are the same answer.

    A percent sign on both sides or on neither changes nothing; on one side only, p% stands for both p and p/100, since a
    question "how many percent" has the answer 50, 50% or 0.5.
    """
    if gold.is_percent == response.is_percent:
        return _same(gold, response)
    percent, plain = (gold, response) if gold.is_percent else (response, gold)
    as_fraction = PlainNumber(percent.value / 100, percent.decimals + 2 if percent.decimals else 0, False)
    return _same(percent, plain) or _same(as_fraction, plain)


def _same(a: PlainNumber, b: PlainNumber) -> bool:
    if a.value == b.value:
        return True
    return _rounds_to(a, b) or _rounds_to(b, a)


def _rounds_to(exact: PlainNumber, rounded: PlainNumber) -> bool:
    significant = abs(rounded.value) * 10**rounded.decimals
    if rounded.decimals < ROUNDED_DECIMALS or significant < 10 ** (ROUNDED_DIGITS - 1):
        return False
    return round(exact.value, rounded.decimals) == rounded.value


def _value(found: dict[str, str]) -> tuple[Fraction | None, int]:
    """The unsigned value and the number of decimal places, from the groups of one of the forms."""
    if "decimal" in found:
        exponent = int(found.get("e") or found.get("t") or 0)
        whole, _, part = found["decimal"].partition(".")
        places = len(part)
        value = Fraction(int(whole + part), 10**places)
        if exponent:
            value *= Fraction(10) ** exponent
        return value, max(0, places - exponent) if places else 0
    if "power" in found:
        return Fraction(10) ** int(found["power"]), 0
    if "repeat" in found:
        lead, repeat = found["lead"], found["repeat"]
        places = len(lead.partition(".")[2])
        period = Fraction(int(repeat), (10 ** len(repeat) - 1) * 10**places)
        return Fraction(("0" + lead).rstrip(".")) + period, 0
    numerator = int(found.get("n") or found["n1"])
    denominator = int(found.get("d") or found["d1"])
    if denominator == 0 or ("whole" in found and numerator < 0):
        return None, 0
    return int(found.get("whole", 0)) + Fraction(numerator, denominator), 0
