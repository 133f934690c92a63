r"""Units of answers: `unit_after` finds the unit of a number, `values_agree` compares two quantities.

Only units of the table count, and only if both the gold answer and the answer have one: 45 minutes are not 45 hours, 2 m are
200 cm, and 75 cents are \$0.75. Everything else is compared without its unit.
"""

import re
from fractions import Fraction

_DAY = 86_400
_UNITS: dict[str, dict[str, int | Fraction]] = {
    "time": {
        "s|sec|secs|seconds?|segundos?|secondes?|sekunden?|秒": 1,
        "min|mins|minutes?|minutos?|minuten?|分钟|分": 60,
        "h|hrs?|hours?|horas?|heures?|stunden?|小时|時間": 3600,
        "days?|días?|dias?|jours?|tage?n?|天": _DAY,
        "weeks?|semanas?|semaines?|wochen?": 7 * _DAY,
        "months?|mes|meses|mois|monate?n?": 30 * _DAY,
        "yrs?|years?|años?|anos?|ans|jahre?n?|年": 365 * _DAY,
    },
    "length": {
        "nm|nanomet(?:er|re)s?": Fraction(1, 10**9),
        "\u00b5m|\u03bcm|micromet(?:er|re)s?|microns?": Fraction(1, 10**6),
        "mm|millimet(?:er|re)s?": Fraction(1, 1000),
        "cm|centimet(?:er|re)s?|厘米": Fraction(1, 100),
        "m|met(?:er|re)s?|metros?|mètres?|米": 1,
        "km|kilomet(?:er|re)s?|kilómetros?|千米|公里": 1000,
        "inch(?:es)?": Fraction(254, 10_000),
        "ft|feet|foot": Fraction(3048, 10_000),
        "yards?|yd": Fraction(9144, 10_000),
        "miles?|mi": Fraction(1_609_344, 1000),
    },
    "mass": {"mg|milligrams?": Fraction(1, 1000), "g|grams?|gramos?|grammes?": 1, "kg|kilograms?|kilos?|千克|公斤": 1000},
    "volume": {"ml|mL|millilit(?:er|re)s?": Fraction(1, 1000), "l|L|lit(?:er|re)s?|litros?|升": 1},
    "angle": {r"\^ ?\{? ?\\circ ?\}?(?! ?[CF])|\u00b0(?! ?[CF])|degrees?(?! ?[CF])|grad": 1, "rad|radians?": Fraction(573, 10)},
    "energy": {
        "J|joules?": 1,
        "kJ|kilojoules?": 1000,
        "MJ": 10**6,
        "cal": Fraction(4184, 1000),
        "kcal": 4184,
        "eV": Fraction(1, 10**15),
    },
    "power": {"mW": Fraction(1, 1000), "W|watts?": 1, "kW|kilowatts?": 1000, "MW": 10**6},
    "force": {"mN": Fraction(1, 1000), "N|newtons?": 1, "kN": 1000, "MN": 10**6},
    "voltage": {"mV": Fraction(1, 1000), "V|volts?": 1, "kV": 1000},
    "current": {"mA": Fraction(1, 1000), "A|amp(?:ere)?s?": 1},
    "pressure": {"Pa|pascals?": 1, "kPa": 1000, "MPa": 10**6, "bar": 10**5, "atm": 101_325},
    "frequency": {"Hz|hertz": 1, "kHz": 1000, "MHz": 10**6, "GHz": 10**9},
    "data": {"bytes?": 1, "KB|kB": 1000, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    "amount": {"mmol": Fraction(1, 1000), "mol|moles?": 1},
    "kelvin": {"K|kelvins?": 1},
    "celsius": {r"(?:\^ ?\{? ?\\circ ?\}?|\u00b0) ?C": 1},
    "fahrenheit": {r"(?:\^ ?\{? ?\\circ ?\}?|\u00b0) ?F": 1},
    "usd": {"(?:US )?[Dd]ollars?|USD|dólares": 1},
    "eur": {r"€|\\?euros?|Euros?|EUR": 1},
    "gbp": {"£|GBP": 1, "pence|penny|pennies": Fraction(1, 100)},
    "inr": {"₹|rupees?|INR": 1},
    "jpy": {"yen|JPY|円": 1},
    "cny": {"yuan|CNY|RMB|元": 1},
    "brl": {"reais|real|BRL": 1},
    "cent": {r"¢|\\?cents?|Cents?|céntimos?|centimes?|centesimi|centavos?": Fraction(1, 100)},
    "pound": {"pounds?": 1},
    "speed": {r"m/s": Fraction(36, 10), r"km/h|kmh|kph": 1, "mph": Fraction(1_609_344, 1_000_000)},
}
_FACTORS = {names: (kind, Fraction(factor)) for kind, units in _UNITS.items() for names, factor in units.items()}
_PATTERNS = [(re.compile(rf"(?:{names})(?![A-Za-z/]| ?/)"), of) for names, of in _FACTORS.items()]
_SIGNS = {"$": "usd", "US$": "usd", "USD": "usd", "R$": "brl", "€": "eur", "EUR": "eur", "£": "gbp", "GBP": "gbp", "₹": "inr"}
_SIGNS |= {"Rs": "inr", "Rs.": "inr", "¥": "yen or yuan"}
_SIGN = re.compile(r"(?:(?P<sign>USD|EUR|GBP|Rs\.?|[€£₹¥])|(?P<country>[A-Z]{0,2})(?P<escape>\\?)\$) ?[-*]{0,3}\Z")
_CLOSING = re.compile(r"[^\n$\\]*(?:\\.[^\n$\\]*)*\$")  # matches the end of a formula
# Units that can stand for several others; a pound may be sterling or mass.
_ANY_OF = {"cent1": ("usd1", "eur1"), "pound1": ("gbp1",), "yen or yuan1": ("jpy1", "cny1")}
_SQUARE = re.compile(r"(?:square|sq\.?|quadrat) ?|(cubic) ?", re.IGNORECASE)
_GAP = r"(?:\\[,;:! ]|[\s$*_~{}]|\\(?:text|textrm|mathrm|rm)(?![A-Za-z]))*"
_POWER = re.compile(r"\}? ?(?:\^ ?\{? ?([23])|([\u00b2\u00b3]))")
# Matches the continuation of a compound unit.
_MORE = re.compile(r"\}? ?(?:\^|(?:[\u00b7/\u207b]|\*(?!\*))|\\cdot|(?:\\[,;: ])? ?[A-Za-z]{1,3} ?\^)")
_DIRECTION = re.compile(r"\b(anti-?|counter-?)?clockwise\b", re.IGNORECASE)
_PAST_OR_FUTURE = re.compile(
    r"\b(?:years?|days?|weeks?|months?|hours?|minutes?) (?:(ago|earlier|before)|from now|later|hence)\b"
)
_LOOK = 40  # number of characters to search after the number


def unit_after(text: str, number: str) -> str:
    """Return the unit of the last `number` in the text as "{dimension}{power}:{factor}", such as "length2:1"; else ""."""
    if not number:
        return ""
    place = text.rfind(number)
    if place < 0:
        whole, point, decimals = number.partition(".")
        grouped = f"{int(whole):,}"
        for number in (grouped + point + decimals, grouped.replace(",", ".") + (point and "," + decimals)):
            if (place := text.rfind(number)) >= 0:
                break
    if place < 0:
        return ""
    if place and (currency := _currency(text, place)):
        return f"{currency}1:1"
    rest = re.sub(rf"\A{_GAP}", "", text[place + len(number) : place + len(number) + _LOOK])
    if not rest or rest[0] in ".,;:)":
        return ""
    word = _SQUARE.match(rest)
    power = (3 if word[1] else 2) if word else 1
    rest = rest[word.end() :] if word else rest
    if direction := _DIRECTION.search(text[place : place + len(number) + _LOOK]):
        return f"direction{'-' if direction[1] else '+'}:1"
    if when := _PAST_OR_FUTURE.search(text[place : place + len(number) + _LOOK]):
        return f"{'past' if when[1] else 'future'}:1"
    for pattern, (dimension, factor) in _PATTERNS:  # noqa: B007 -- used below
        if (found := pattern.match(rest)) is not None:
            break
    else:
        return ""
    exponent = _POWER.match(rest, found.end())
    if _MORE.match(rest, exponent.end() if exponent else found.end()):
        return ""
    if exponent:
        power = int(exponent[1] or {"\u00b2": "2", "\u00b3": "3"}[exponent[2]])
    return f"{dimension}{power}:{factor**power}"


def _currency(text: str, place: int) -> str:
    """Return the dimension of the currency sign before `place`; "" if there is none. A dollar sign may open a formula."""
    sign = _SIGN.search(text[max(0, place - 8) : place])
    if sign is None or (not sign["sign"] and not sign["escape"] and _CLOSING.match(text, place)):
        return ""
    return _SIGNS.get(sign["sign"] or f"{sign['country']}$", "")


def values_agree(gold: Fraction, gold_unit: str, value: Fraction, unit: str) -> bool:
    """Return whether two quantities with units of the table are the same."""
    (dimension, _, factor), (other, _, other_factor) = gold_unit.partition(":"), unit.partition(":")
    is_same = dimension == other or other in _ANY_OF.get(dimension, ()) or dimension in _ANY_OF.get(other, ())
    return is_same and gold * Fraction(factor) == value * Fraction(other_factor)
