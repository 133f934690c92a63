r"""Compare answers that are neither plain numbers nor formulas (`compare_kinds`), in normalized form.

The kinds are residues (3 \pmod{7}), times of day, names in any order ("Bob and Alice"), no solution against \emptyset, a
number with a decimal comma, and a column vector against a tuple. The gold answer or the answer must be of the kind. The result
is None if no kind applies.
"""

import re

from grpo_mega.rewards.math.numbers import numbers_equal, parse_number

TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?: ?([aApP])\.? ?[mM]\.?)?|(\d{1,2}) ?([aApP])\.? ?[mM]\.?")

_RESIDUE = re.compile(r"(-?\d+) ?\\pmod\{(\d+)\}")
_NAME = re.compile(r"[^\W\d_][^\W\d_]*(?:[ '-][^\W\d_]+)*")
_AND = r"(?:and|und|et|y|e|i|и|和|と)"
_JOIN = re.compile(rf" *(?:,|;|&|(?<= ){_AND}(?= )) *")
_JOINED = re.compile(rf" (?:{_AND}|&) ")
_DECIMAL_COMMA = re.compile(r"-?\d{1,3}(?:[ .]?\d{3})*,\d+")
_GAP = r"(?:,? (?:and )?|,|$)"
_SPAN = re.compile(
    rf"(?:(\d{{1,6}}) ?d(?:ays?)?{_GAP})?(?:(\d{{1,6}}) ?h(?:(?:ou)?rs?)?{_GAP})?(?:(\d{{1,6}}) ?min(?:ute)?s?{_GAP})?"
    r"(?:(\d{1,6}) ?s(?:ec(?:ond)?s?)?)?"
)
_MONTH_NAMES = (
    "january",
    "february",
    "march",
    "april",
    "may",
    "june",
    "july",
    "august",
    "september",
    "october",
    "november",
    "december",
)
_MONTH = "|".join(_MONTH_NAMES)
_DATE = re.compile(
    rf"(\d{{4}})-(0[1-9]|1[0-2])-(\d\d)|(\d{{1,2}})(?:st|nd|rd"
    rf"|th)? ({_MONTH}),? (\d{{4}})|({_MONTH}) (\d{{1,2}})(?:st|nd|rd|th)?,? (\d{{4}})",
    re.IGNORECASE,
)
_TUPLES = re.compile(r"\(([A-Za-z](?: ?, ?[A-Za-z])+)\) ?= ?\(([^()]*)\)")
_ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w\}?)?) ?= ?([^=]+)")
_LETTERS = re.compile(r"[A-J](?:(?: ?, ?| and |, and | ?)[A-J]){1,5}")
_COLUMN = re.compile(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}")
_NO_SOLUTION = frozenset({"no solution", "\\emptyset", "emptyset"})


def compare_kinds(gold: str, text: str) -> bool | None:
    """Return whether two normalized answers are the same; None if no kind decides it."""
    if "pmod" in gold or "pmod" in text:
        return _same_residue(gold, text)
    if (gold_time := _minutes(gold)) and (time := _minutes(text)):
        return _same_time(gold_time, time)
    if (values := _assigned(gold)) and (others := _assigned(text)) and values.keys() == others.keys():
        numbers = [(parse_number(values[name]), parse_number(others[name])) for name in values]
        if all(one and other for one, other in numbers):
            return all(numbers_equal(one, other) for one, other in numbers if one and other)
    if _LETTERS.fullmatch(gold) and _LETTERS.fullmatch(text):
        return sorted(re.findall("[A-J]", gold)) == sorted(re.findall("[A-J]", text))
    if (date := _date(gold)) and (other_date := _date(text)):
        return date == other_date
    if gold in _NO_SOLUTION and text in _NO_SOLUTION:
        return True
    if (_JOINED.search(gold) or _JOINED.search(text)) and (names := _names(gold)) and (other_names := _names(text)):
        return names == other_names
    if "," in text and (number := parse_number(gold)) and _DECIMAL_COMMA.fullmatch(text):
        other = parse_number(re.sub(r"[ .]", "", text).replace(",", "."))
        return other is not None and numbers_equal(number, other)
    if (column := _COLUMN.fullmatch(gold)) and text.startswith("("):
        return _elements(column[1], "\\\\") == _elements(text[1:-1], ",")
    if (column := _COLUMN.fullmatch(text)) and gold.startswith("("):
        return _elements(column[1], "\\\\") == _elements(gold[1:-1], ",")
    return None


def seconds_of(text: str) -> int | None:
    """Return the length in seconds of a time span such as 1 hour 30 minutes or 7 h 12 min."""
    match = _SPAN.fullmatch(text) if text[:1].isdigit() else None
    parts = [int(part or 0) for part in match.groups()] if match else []
    return parts[0] * 86_400 + parts[1] * 3600 + parts[2] * 60 + parts[3] if any(parts) else None


def _same_residue(gold: str, text: str) -> bool | None:
    """Compare 3 mod 7 with 10 mod 7 by residue. Compare a residue with a plain number by the number."""
    sides = [_RESIDUE.fullmatch(side) for side in (gold, text)]
    if sides[0] and sides[1]:
        modulus = int(sides[0][2][:100])
        return (
            modulus == int(sides[1][2][:100])
            and modulus > 0
            and not (int(sides[0][1][:100]) - int(sides[1][1][:100])) % modulus
        )
    residue, plain = (sides[0], text) if sides[0] else (sides[1], gold)
    if residue is None or not (number := parse_number(plain)):
        return None
    return number.value == int(residue[1][:100])


def _assigned(text: str) -> dict[str, str]:
    """Return the values by name of a=3, b=-1 or of (a,b)=(3,-1); {} if the text is neither."""
    if "=" not in text or ("," not in text and " and " not in text):
        return {}
    if match := _TUPLES.fullmatch(text):
        names, values = (group.split(",") for group in match.groups())
        return (
            {name.strip(): value.strip() for name, value in zip(names, values, strict=False)}
            if len(names) == len(values)
            else {}
        )
    matches = [_ASSIGNMENT.fullmatch(part.strip()) for part in re.split(r",| and ", text)]
    return {match[1]: match[2].strip() for match in matches if match} if all(matches) else {}


def _date(text: str) -> tuple[int, str, int] | None:
    """Return the year, month and day of a date."""
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    _, iso_year, iso_month, iso_day, day, month, year, other_month, other_day, other_year = (None, *match.groups())
    if iso_year:
        return int(iso_year), _MONTH_NAMES[int(iso_month) - 1], int(iso_day)
    return int(year or other_year), (month or other_month).lower(), int(day or other_day)


def _minutes(text: str) -> tuple[int, str] | None:
    """Return the minutes of a time of day, and "am", "pm" or ""."""
    if not text[:1].isdigit() or not (match := TIME.fullmatch(text)):
        return None
    hour, half = int(match[1] or match[4]), (match[3] or match[5] or "").lower()
    return 60 * hour + int(match[2] or 0), half


def _same_time(gold: tuple[int, str], time: tuple[int, str]) -> bool:
    """Return whether two times agree, including am or pm if the gold answer has it. 19:30 is 7:30 pm."""
    (minutes, half), (other, other_half) = gold, time
    if half == other_half or (not half and minutes == other and minutes < 13 * 60):
        return minutes == other
    return bool(half) != bool(other_half) and max(minutes, other) >= 13 * 60 and _of_day(gold) == _of_day(time)


def _of_day(time: tuple[int, str]) -> int:
    minutes, half = time
    return minutes % (12 * 60) + 12 * 60 * (half == "p") if half else minutes


def _names(text: str) -> frozenset[str] | None:
    """Return the names of a list in lower case; None if the text is not a list of several names."""
    parts = [part.strip().lower() for part in _JOIN.split(text)]
    parts = [part for part in parts if part]
    if len(parts) < 2 or not all(_NAME.fullmatch(part) and len(part.split()) <= 3 for part in parts):
        return None
    return frozenset(parts)


def _elements(text: str, separator: str) -> list[str]:
    return [part.replace(" ", "") for part in text.split(separator)]
