r"""Compare answers that are neither plain numbers nor formulas, in normalized form: `compare_kinds` and quantities with
units.

The kinds are residues (3 \pmod{7}), times of day, names in any order ("Bob and Alice"), no solution against \emptyset,
a number with a decimal comma, and a column vector against a tuple. The gold answer or the answer must be of the kind.
The result is None if no kind applies.

`unit_after` finds the unit of a number, `values_agree` compares two quantities. Only units of the table count, and only
if both the gold answer and the answer have one: 45 minutes are not 45 hours, 2 m are 200 cm, and 75 cents are \$0.75.
Everything else is compared without its unit.
"""

import re
from fractions import Fraction
from math import gcd

from grpo_mega.rewards.math.numbers import numbers_equal, parse_number

TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?: ?([aApP])\.? ?[mM]\.?)?|(\d{1,2}) ?([aApP])\.? ?[mM]\.?")

_RESIDUE = re.compile(r"(-?\d+) ?\\pmod\{(\d+)\}")
_NAME = re.compile(r"[^\W\d_][^\W\d_]*(?:[ '-][^\W\d_]+)*")
_AND = r"(?:and|und|et|y|e|i|и|和|と)"
_JOIN = re.compile(rf" *(?:,|;|&|(?<= ){_AND}(?= )) *")
_JOINED = re.compile(rf" (?:{_AND}|&) ")
_DECIMAL_COMMA = re.compile(r"-?\d{1,3}(?:[ .]?\d{3})*,\d+")
_PART = r"(?:,? (?:and )?|,|$)"
_SPAN = re.compile(
    rf"(?:(\d{{1,6}}) ?d(?:ays?)?{_PART})?(?:(\d{{1,6}}) ?h(?:(?:ou)?rs?)?{_PART})?(?:(\d{{1,6}})"
    rf" ?min(?:ute)?s?{_PART})?"
    r"(?:(\d{1,6}) ?s(?:ec(?:ond)?s?)?)?"
)
_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAY, _MONTH = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", rf"(?P<month>(?:{_MONTHS})[a-z]*)\.?"
_DATES = tuple(
    re.compile(form, re.IGNORECASE | re.ASCII)
    for form in (
        (
            r"(?P<year>\d{4})(?P<mark>[-/.])(?P<month>0?[1-9]|1[0-2])(?P=mark)(?P<day>\d\d?)"
            r"(?:[T ](?!00:00)(?P<time>\d\d:\d\d(?::(?!00)\d\d)?)|[T ]00:00)?(?::00)?"
        ),
        rf"(?:[a-z]+day,? )?{_DAY}(?: of)? {_MONTH},? (?P<year>\d{{4}})",
        rf"(?:[a-z]+day,? )?{_MONTH} {_DAY},? (?P<year>\d{{4}})",
        r"(?P<first>\d\d?)/(?P<second>\d\d?)/(?P<year>\d{4})",
    )
)
# Matches numerals that are a text: a range, a score, a telephone number, an ISBN, a version, a time with seconds.
_CODE = re.compile(
    r"(?:\+?\d{1,3}[ -])?(?:\(\d+\) ?)?\d+(?:-\d+)+|\d+(?:\.\d+){2,}|\d+(?:/\d+){2,}|\d\d?:[0-5]\d:[0-5]\d", re.ASCII
)
_PART_OF_LIST = r"(?:[^()\[\]<>=|:]|\([^()]*\))*"
# Matches a set, or a tuple or an interval.
_SET_OR_TUPLE = re.compile(
    rf"(?:[A-Za-z] ?(?:=|\\in(?![A-Za-z])) ?)?(?:(?P<set>\\\{{){_PART_OF_LIST},{_PART_OF_LIST}\\\}}"
    rf"|[(\[]{_PART_OF_LIST},{_PART_OF_LIST}[)\]])"
)
_TUPLES = re.compile(r"\(([A-Za-z](?: ?, ?[A-Za-z])+)\) ?= ?\(([^()]*)\)")
_ASSIGNMENT = re.compile(r"([A-Za-z](?:_\{?\w\}?)?) ?= ?([^=]+)")
_LETTERS = re.compile(r"[A-J](?:(?: ?, ?| and |, and | ?)[A-J]){1,5}")
_COLUMN = re.compile(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}")
_NO_SOLUTION = frozenset({"no solution", "\\emptyset", "emptyset"})

# Per line: the dimension, the factor, and a pattern of the unit's names.
_UNITS = r"""
time       1        s|sec|secs|seconds?|segundos?|secondes?|sekunden?|秒
time       60       min|mins|minutes?|minutos?|minuten?|分钟|分
time       3600     h|hrs?|hours?|horas?|heures?|stunden?|小时|時間
time       86400    days?|días?|dias?|jours?|tage?n?|天
time       604800   weeks?|semanas?|semaines?|wochen?
time       2592000  months?|mes|meses|mois|monate?n?
time       31536000 yrs?|years?|años?|anos?|ans|jahre?n?|年
length     1e-9     nm|nanomet(?:er|re)s?
length     0.000001 µm|μm|micromet(?:er|re)s?|microns?
length     0.001    mm|millimet(?:er|re)s?
length     0.01     cm|centimet(?:er|re)s?|厘米
length     1        m|met(?:er|re)s?|metros?|mètres?|米
length     1000     km|kilomet(?:er|re)s?|kilómetros?|千米|公里
length     0.0254   inch(?:es)?
length     0.3048   ft|feet|foot
length     0.9144   yards?|yd
length     1609.344 miles?|mi
mass       0.001    mg|milligrams?
mass       1        g|grams?|gramos?|grammes?
mass       1000     kg|kilograms?|kilos?|千克|公斤
volume     0.001    ml|mL|millilit(?:er|re)s?
volume     1        l|L|lit(?:er|re)s?|litros?|升
angle      1        \^ ?\{? ?\\circ ?\}?(?! ?[CF])|\u00b0(?! ?[CF])|degrees?(?! ?[CF])|grad
angle      57.3     rad|radians?
energy     1        J|joules?
energy     1000     kJ|kilojoules?
energy     1000000  MJ
energy     4.184    cal
energy     4184     kcal
energy     1e-15    eV
power      0.001    mW
power      1        W|watts?
power      1000     kW|kilowatts?
power      1000000  MW
force      0.001    mN
force      1        N|newtons?
force      1000     kN
force      1000000  MN
voltage    0.001    mV
voltage    1        V|volts?
voltage    1000     kV
current    0.001    mA
current    1        A|amp(?:ere)?s?
pressure   1        Pa|pascals?
pressure   1000     kPa
pressure   1000000  MPa
pressure   100000   bar
pressure   101325   atm
frequency  1        Hz|hertz
frequency  1000     kHz
frequency  1000000  MHz
frequency  1e9      GHz
data       1        bytes?
data       1000     KB|kB
data       1000000  MB
data       1e9      GB
data       1e12     TB
amount     0.001    mmol
amount     1        mol|moles?
kelvin     1        K|kelvins?
celsius    1        (?:\^ ?\{? ?\\circ ?\}?|\u00b0) ?C
fahrenheit 1        (?:\^ ?\{? ?\\circ ?\}?|\u00b0) ?F
usd        1        (?:US )?[Dd]ollars?|USD|dólares
eur        1        €|\\?euros?|Euros?|EUR
gbp        1        £|GBP
gbp        0.01     pence|penny|pennies
inr        1        ₹|rupees?|INR
jpy        1        yen|JPY|円
cny        1        yuan|CNY|RMB|元
brl        1        reais|real|BRL
cent       0.01     ¢|\\?cents?|Cents?|céntimos?|centimes?|centesimi|centavos?
pound      1        pounds?
speed      3.6      m/s
speed      1        km/h|kmh|kph
speed      1.609344 mph
"""
_PATTERNS = [
    (re.compile(rf"(?:{names})(?![A-Za-z/]| ?/)"), dimension, Fraction(factor))
    for dimension, factor, names in (line.split(maxsplit=2) for line in _UNITS.strip().splitlines())
]
_CURRENCIES = {"usd": "$ US$ USD", "brl": "R$", "eur": "€ EUR", "gbp": "£ GBP", "inr": "₹ Rs Rs.", "yen or yuan": "¥"}
_SIGNS = {sign: currency for currency, signs in _CURRENCIES.items() for sign in signs.split()}
_SIGN = re.compile(r"(?:(?P<sign>USD|EUR|GBP|Rs\.?|[€£₹¥])|(?P<country>[A-Z]{0,2})(?P<escape>\\?)\$) ?[-*]{0,3}\Z")
_CLOSING = re.compile(r"[^\n$\\]*(?:\\.[^\n$\\]*)*\$")  # matches the end of a formula
# Units that can stand for several others; a pound may be sterling or mass.
_ANY_OF = {"cent1": ("usd1", "eur1"), "pound1": ("gbp1",), "yen or yuan1": ("jpy1", "cny1")}
_SQUARE = re.compile(r"(?:square|sq\.?|quadrat) ?|(cubic) ?", re.IGNORECASE)
_GAP = re.compile(r"\A(?:\\[,;:! ]|[\s$*_~{}]|\\(?:text|textrm|mathrm|rm)(?![A-Za-z]))*")
_POWER = re.compile(r"\}? ?(?:\^ ?\{? ?[23]|[\u00b2\u00b3])")
# Matches the continuation of a compound unit.
_MORE = re.compile(r"\}? ?(?:\^|(?:[\u00b7/\u207b]|\*(?!\*))|\\cdot|(?:\\[,;: ])? ?[A-Za-z]{1,3} ?\^)")
_DIRECTION = re.compile(r"\b(anti-?|counter-?)?clockwise\b", re.IGNORECASE)
_PAST_OR_FUTURE = re.compile(
    r"\b(?:years?|days?|weeks?|months?|hours?|minutes?) (?:(ago|earlier|before)|from now|later|hence)\b"
)
_LOOK = 40  # number of characters to search after the number


def compare_kinds(gold: str, text: str) -> bool | None:
    """Return whether two normalized answers are the same; None if no kind decides it."""
    if "pmod" in gold or "pmod" in text:
        # Compare 3 mod 7 with 10 mod 7 by residue, and a residue with a plain number by the number.
        sides = [
            [int(part[:100]) for part in match.groups()] for side in (gold, text) if (match := _RESIDUE.fullmatch(side))
        ]
        if len(sides) == 2:
            (residue, modulus), (other_residue, other_modulus) = sides
            return modulus == other_modulus and modulus > 0 and not (residue - other_residue) % modulus
        number = parse_number(gold) or parse_number(text)
        return number.value == sides[0][0] if sides and number else None
    if is_code(gold):
        # A text such as "3 to 5" is 3:5 here.
        plain, expected = (one.replace(" ", "").replace(":", "-") for one in (text, gold))
        return plain == expected or (_date(gold) or "no date") == _date(text)
    gold_brackets, brackets = _SET_OR_TUPLE.fullmatch(gold), _SET_OR_TUPLE.fullmatch(text)
    if gold_brackets and brackets and gold_brackets["set"] != brackets["set"]:
        return False
    if (gold_time := _minutes(gold)) and (time := _minutes(text)):
        (minutes, half), (other_minutes, other_half) = gold_time, time
        if half == other_half or (not half and minutes == other_minutes and minutes < 13 * 60):
            return minutes == other_minutes
        has_24_hours = bool(half) != bool(other_half) and max(minutes, other_minutes) >= 13 * 60  # 19:30 is 7:30 pm
        return has_24_hours and _of_day(gold_time) == _of_day(time)
    if gold_time and not gold_time[1] and gcd(*divmod(gold_time[0], 60)) > 1:  # a ratio would be in lowest terms
        return False
    if (values := _assigned(gold)) and (others := _assigned(text)) and values.keys() == others.keys():
        numbers = [(parse_number(values[name]), parse_number(others[name])) for name in values]
        if all(one and other for one, other in numbers):
            return all(numbers_equal(one, other) for one, other in numbers if one and other)
    if _LETTERS.fullmatch(gold) and _LETTERS.fullmatch(text):  # several choices, such as A and C
        return sorted(re.findall("[A-J]", gold)) == sorted(re.findall("[A-J]", text))
    if gold in _NO_SOLUTION and text in _NO_SOLUTION:
        return True
    if (_JOINED.search(gold) or _JOINED.search(text)) and (names := _names(gold)) and (other_names := _names(text)):
        return names == other_names
    if "," in text and (number := parse_number(gold)) and _DECIMAL_COMMA.fullmatch(text):
        other = parse_number(re.sub(r"[ .]", "", text).replace(",", "."))
        return other is not None and numbers_equal(number, other)
    for one, other_side in ((gold, text), (text, gold)):
        if (column := _COLUMN.fullmatch(one)) and other_side.startswith("("):
            return column[1].replace(" ", "").split("\\\\") == other_side[1:-1].replace(" ", "").split(",")
    return None


def is_code(gold: str) -> bool:
    """Return whether a gold answer is a date, or numerals that are a text, although math-verify would calculate it."""
    return bool(_CODE.fullmatch(gold) or _date(gold))


def seconds_of(text: str) -> int | None:
    """Return the length in seconds of a time span such as 1 hour 30 minutes or 7 h 12 min."""
    match = _SPAN.fullmatch(text) if text[:1].isdigit() else None
    parts = [int(part or 0) for part in match.groups()] if match else []
    return parts[0] * 86_400 + parts[1] * 3600 + parts[2] * 60 + parts[3] if any(parts) else None


def unit_after(text: str, number: str) -> str:
    """Return the unit of the last `number` in the text as "{dimension}{power}:{factor}", such as "length2:1"; else
    "".
    """
    whole, point, decimals = number.partition(".")
    grouped = f"{int(whole):,}" if whole.isdigit() else whole
    spellings = (number, grouped + point + decimals, grouped.replace(",", ".") + (point and "," + decimals))
    place, number = next(((place, one) for one in spellings if (place := text.rfind(one)) >= 0), (-1, ""))
    if not number:
        return ""
    # A dollar sign may open a formula.
    sign = _SIGN.search(text[max(0, place - 8) : place])
    if sign and (sign["sign"] or sign["escape"] or not _CLOSING.match(text, place)):
        currency = _SIGNS.get(sign["sign"] or f"{sign['country']}$")
        if currency:
            return f"{currency}1:1"
    window = text[place + len(number) : place + len(number) + _LOOK]
    rest = _GAP.sub("", window, count=1)
    if not rest or rest[0] in ".,;:)":
        return ""
    word = _SQUARE.match(rest)
    power = 3 if word and word[1] else 2 if word else 1
    rest = rest[word.end() :] if word else rest
    if direction := _DIRECTION.search(number + window):
        return f"direction{'-' if direction[1] else '+'}:1"
    if when := _PAST_OR_FUTURE.search(number + window):
        return f"{'past' if when[1] else 'future'}:1"
    for pattern, dimension, factor in _PATTERNS:
        if found := pattern.match(rest):
            exponent = _POWER.match(rest, found.end())
            if exponent:
                power = 2 if "2" in exponent[0] or "\u00b2" in exponent[0] else 3
            is_compound = _MORE.match(rest, (exponent or found).end())
            return "" if is_compound else f"{dimension}{power}:{factor**power}"
    return ""


def values_agree(gold: Fraction, gold_unit: str, value: Fraction, unit: str) -> bool:
    """Return whether two quantities with units of the table are the same."""
    (dimension, _, factor), (other, _, other_factor) = gold_unit.partition(":"), unit.partition(":")
    is_same = dimension == other or other in _ANY_OF.get(dimension, ()) or dimension in _ANY_OF.get(other, ())
    return is_same and gold * Fraction(factor) == value * Fraction(other_factor)


def _assigned(text: str) -> dict[str, str]:
    """Return the values by name of a=3, b=-1 or of (a,b)=(3,-1); {} if the text is neither."""
    if "=" not in text or ("," not in text and " and " not in text):
        return {}
    if match := _TUPLES.fullmatch(text):
        names, values = ([part.strip() for part in group.split(",")] for group in match.groups())
        return dict(zip(names, values, strict=True)) if len(names) == len(values) else {}
    matches = [_ASSIGNMENT.fullmatch(part.strip()) for part in re.split(r",| and ", text)]
    return {match[1]: match[2].strip() for match in matches if match} if all(matches) else {}


def _date(text: str) -> tuple[int, int, int, str | None] | None:
    """Return the year, month, day and time of a date. 05/01/2024 has no known month, so it equals no other form."""
    for form in _DATES:
        if match := form.fullmatch(text):
            parts = match.groupdict()
            if "first" in parts:
                first, second = int(parts["first"]), int(parts["second"])
                month, day = (second, first) if first > 12 else (first, second)
                if first != second and month <= 12 and day <= 12:
                    month, day = -month, -day
            else:
                name, day = parts["month"].lower(), int(parts["day"])
                month = int(name) if name.isdigit() else _MONTHS.split("|").index(name[:3]) + 1
            return int(parts["year"]), month, day, parts.get("time")
    return None


def _minutes(text: str) -> tuple[int, str] | None:
    """Return the minutes of a time of day, and "am", "pm" or ""."""
    if not text[:1].isdigit() or not (match := TIME.fullmatch(text)):
        return None
    hour, half = int(match[1] or match[4]), (match[3] or match[5] or "").lower()
    return 60 * hour + int(match[2] or 0), half


def _of_day(time: tuple[int, str]) -> int:
    """Return the minutes since midnight."""
    minutes, half = time
    return minutes % (12 * 60) + 12 * 60 * (half == "p") if half else minutes


def _names(text: str) -> frozenset[str] | None:
    """Return the names of a list in lower case; None if the text is not a list of several names."""
    parts = [name for part in _JOIN.split(text) if (name := part.strip().lower())]
    if len(parts) < 2 or not all(_NAME.fullmatch(part) and len(part.split()) <= 3 for part in parts):
        return None
    return frozenset(parts)
