"""Plain numbers and lists of plain numbers, read from normalized answers and compared exactly.

Input: text from `normalize.normalize_answer`. A plain number is an integer, decimal (0.5, .5, 1.5e3, 1.5\\times10^{3}),
fraction (1/2, \\frac{1}{2}), mixed number (1 1/2, 1\\frac{1}{2}) or repeating decimal (0.\\overline{3}), with an
optional sign and percent sign. The comparison is exact, because math-verify rounds decimals to six places: it accepts
1e-7 for 2e-7.

Pairs, intervals and sets of plain numbers, as (1,-2), [0,1/2), \\{1,2,3\\}, are compared here only if the verdict is
beyond doubt and equals math-verify's: both sides have the same brackets, and simple numbers that are equal or clearly
differ. Some lists have a special meaning in math-verify and are left to it: one element, equal ends, an interval's ends
in descending order, a repeated element.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_DIGITS = 1000  # limit for arithmetic on integers; int() refuses 4,300
ROUNDED_DECIMALS = 6  # a decimal with at least this many places may be a rounded number, as in math-verify ...
ROUNDED_DIGITS = 4  # ... if it also has this many significant digits: 0.000001 does not stand for 0.0000014

_SIGN = r"(?P<sign>[-+]?) ?"
_FRAC = r"\\[dtc]?frac(?: ?\{ ?(?P<n>-?\d+) ?\} ?\{ ?(?P<d>\d+) ?\}| ?(?P<n1>\d) ?(?P<d1>\d))"
_FORMS = tuple(
    re.compile(_SIGN + form, re.ASCII)
    for form in (
        (
            r"(?P<decimal>\d+\.?\d*|\.\d+)(?:[eE](?P<e>[-+]?\d{1,3})| ?(?:\\times|\\cdot|\*) ?10 ?\^"
            r" ?\{?(?P<t>-?\d{1,3})\}?)?"
        ),
        r"10 ?\^ ?\{? ?(?P<power>-?\d{1,3}) ?\}?",
        r"(?:(?P<whole>\d+) )?(?P<n>\d+) ?/ ?(?P<d>\d+)",
        r"(?:(?P<whole>\d+) ?)?" + _FRAC,
        r"(?P<lead>\d*\.\d*)\\overline ?\{(?P<repeat>\d+)\}",
    )
)
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {word: value for value, word in enumerate(_ONES.split())}
_WORDS |= {word: 10 * tens for tens, word in enumerate(_TENS.split(), start=2)}
_WORDS |= {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 1_000_000}
_DENOMINATORS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10}
_DENOMINATORS |= {f"{word}s": value for word, value in _DENOMINATORS.items()} | {"halves": 2}
_ELEMENT = r"-?(?:\d{1,9}(?:\.\d{1,9})?|\d{1,9}/\d{1,9}|\\[dt]?frac\{\d{1,9}\}\{\d{1,9}\})"
_LIST = re.compile(rf"(?P<open>\(|\[|\\\{{)(?P<elements>{_ELEMENT}(?:, ?{_ELEMENT})+)(?P<close>\)|\]|\\\}})", re.ASCII)
_CLEARLY = Fraction(1, 100_000)  # math-verify rounds to six places


@dataclass(frozen=True)
class PlainNumber:
    """The exact value. For a percentage, the value before the sign: 50 for 50%."""

    value: Fraction
    decimals: int  # places after the decimal point, 0 for integers and fractions
    is_percent: bool
    is_cents: bool = False


NumberList = tuple[str, tuple[Fraction, ...]]  # the two brackets, and the values in order (of a set, ascending)


@lru_cache(maxsize=1024)
def parse_number(text: str) -> PlainNumber | None:
    """Return the plain number if the whole `text` is one, else None."""
    if len(text) > MAX_DIGITS:
        return None
    core = text.strip()
    is_cents = core.endswith("¢")
    core = core.removesuffix("¢").strip()
    is_percent = core.endswith("%")
    core = core.removesuffix("%").strip()
    while len(core) > 2 and core[0] + core[-1] in ("()", "{}"):
        core = core[1:-1].strip()
    for form in _FORMS:
        if match := form.fullmatch(core):
            groups = {name: group for name, group in match.groupdict().items() if group is not None}
            value, decimals = _value(groups)
            if value is None:
                return None
            return PlainNumber(-value if groups["sign"] == "-" else value, decimals, is_percent, is_cents)
    return None


def numbers_equal(gold: PlainNumber, response: PlainNumber) -> bool:
    """Return whether two plain numbers are the same answer.

    If both sides have a percent sign, or neither, it does not matter. If only one side has it, p% stands for both p and
    p/100, because a question "how many percent" has the answers 50, 50% and 0.5.
    """
    if gold.is_cents != response.is_cents:  # without a unit, 75 means cents and 0.75 means dollars
        cents, plain = (gold, response) if gold.is_cents else (response, gold)
        is_whole = plain.value.denominator == 1
        return cents.value == (plain.value if is_whole or (gold.is_cents and cents.value < 1) else plain.value * 100)
    if gold.is_percent == response.is_percent:
        return _same(gold, response)
    percent, plain = (gold, response) if gold.is_percent else (response, gold)
    as_fraction = PlainNumber(percent.value / 100, percent.decimals + 2 if percent.decimals else 0, False)
    is_small = response.is_percent and abs(gold.value) < 1  # 0.35% is not 0.35
    return (not is_small and _same(percent, plain)) or _same(as_fraction, plain)


def numbers_contradict(a: PlainNumber, b: PlainNumber) -> bool:
    """Return whether "a = b" is false even if one side is rounded: 17 = 18 is false, 1/3 = 0.33 is not."""
    difference = abs(a.value - b.value)
    steps = [Fraction(1, 10**number.decimals) for number in (a, b) if not (number.value * 10**number.decimals) % 1]
    return not numbers_equal(a, b) and not any(difference < step for step in steps)


def in_words(text: str) -> PlainNumber | None:
    """Return the number that `text` spells, ignoring one noun after it: "twelve", "twenty-five eggs", "three
    quarters".
    """
    parts = text.lower().replace("-", " ").split()
    if len(parts) > 1 and parts[-1].endswith("s") and parts[-1] not in _DENOMINATORS:
        parts.pop()
    if len(parts) > 1 and parts[0] in ("a", "an"):
        parts[0] = "one"
    value, last = Fraction(0), None
    for place, part in enumerate(parts):
        is_end = place == len(parts) - 1
        if part in _DENOMINATORS and is_end:
            return PlainNumber((value or 1) / Fraction(_DENOMINATORS[part]), 0, False)
        if part == "and" and last and not is_end:
            continue
        word = _WORDS.get(part)
        if word is None:
            return None
        if word >= 100 or part == "dozen":
            value = (value or 1) * Fraction(word)
        elif last is None or last >= 100 or (last >= 20 and word < 10):
            value += word
        else:
            return None
        last = word
    return PlainNumber(value, 0, False) if last is not None else None


@lru_cache(maxsize=1024)
def parse_list(text: str) -> NumberList | None:
    """Return the list if the whole `text` is one, else None."""
    match = _LIST.fullmatch(text)
    if match is None:
        return None
    numbers = [parse_number(element) for element in match["elements"].split(",")]
    values = tuple(number.value for number in numbers if number is not None)
    if len(values) < len(numbers) or len(set(values)) < len(values):
        return None
    brackets = match["open"] + match["close"]
    if brackets == r"\{\}":
        return brackets, tuple(sorted(values))
    is_in_order = len(values) == 2 and values[0] < values[1]
    return (brackets, values) if brackets == "()" or (brackets in ("[]", "[)", "(]") and is_in_order) else None


def lists_equal(gold: NumberList, response: NumberList) -> bool | None:
    """Return whether two lists are the same; None if it is in doubt."""
    if gold[0] != response[0] or len(gold[1]) != len(response[1]):
        return None
    difference = max(abs(a - b) for a, b in zip(gold[1], response[1], strict=True))
    return True if not difference else False if difference > _CLEARLY else None


def _same(a: PlainNumber, b: PlainNumber) -> bool:
    return a.value == b.value or _rounds_to(a, b) or _rounds_to(b, a)


def _rounds_to(exact: PlainNumber, rounded: PlainNumber) -> bool:
    significant = abs(rounded.value) * 10**rounded.decimals
    if rounded.decimals < ROUNDED_DECIMALS or significant < 10 ** (ROUNDED_DIGITS - 1):
        return False
    return round(exact.value, rounded.decimals) == rounded.value


def _value(groups: dict[str, str]) -> tuple[Fraction | None, int]:
    """Return the unsigned value and the number of decimal places, from the groups of a match in _FORMS."""
    if "power" in groups:
        return Fraction(f"1e{groups['power']}"), 0
    if "decimal" in groups:
        exponent = groups.get("e") or groups.get("t") or "0"
        places = len(groups["decimal"].partition(".")[2])
        return Fraction(f"{groups['decimal']}e{exponent}"), max(0, places - int(exponent)) if places else 0
    if "repeat" in groups:
        lead, repeat = groups["lead"], groups["repeat"]
        period = Fraction(int(repeat), (10 ** len(repeat) - 1) * 10 ** len(lead.partition(".")[2]))
        return Fraction(f"0{lead}0") + period, 0
    numerator, denominator = int(groups.get("n") or groups["n1"]), int(groups.get("d") or groups["d1"])
    if denominator == 0 or ("whole" in groups and numerator < 0):
        return None, 0
    return int(groups.get("whole", 0)) + Fraction(numerator, denominator), 0
