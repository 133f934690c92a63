"""Bring an answer's text into canonical form (`normalize_answer`), for exact comparison or for math-verify.

Input: text from `answer.read_located`. Output: one line of LaTeX-like text, "" if nothing is left. Removed are words
around the expression, math delimiters, Markdown, LaTeX spacing, currency signs, units, degree signs, thousands
separators and a final full stop. Kept are the percent sign as `%` (whether it matters depends on the other answer), `x
= `, brackets and letters.

A comma in `1,234` separates thousands. In brackets it separates elements: (100,200) is a pair and [1,234] an interval.
In brackets it separates thousands only if another comma has a space after it: (1,234, 5). `1{,}000`, `1\\,000` and
`1,\\!000` are always one number, and so is `10 000` if it is the whole answer.
"""

# ruff: noqa: RUF001 -- this module normalizes characters that look like others

import re
from decimal import Decimal

from grpo_mega.rewards.math.notation import plain, rewrite, rewrite_phrase
from grpo_mega.rewards.math.prose import TAIL, is_prose, read_marked

# A character, then its replacement. A command without arguments gets a space after it.
_SYMBOLS = r"""
−- –- —- ﹣- －- ÷/ ∕/ ⁄/ ’' ²^2 ³^3 ½\frac{1}{2} ¼\frac{1}{4} ¾\frac{3}{4}
×\times ·\cdot ⋅\cdot π\pi ∞\infty ≤\leq ≥\geq ≠\neq ≈\approx ∪\cup ∩\cap ∈\in ∅\emptyset ±\pm
"""
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\t\r", " ")
    | {item[0]: item[1:] + " " * item[1:].replace("\\", "", 1).isalpha() for item in _SYMBOLS.split()}
)
_UNITS = (
    "mm|cm|dm|km|m|ft|in|yd|mi|nm|mg|kg|g|lbs?|oz|ms|s|sec|min|h|hr|hrs|ml|mL|cl|dl|l|L|mph|kph|kmh|km/h|m/s|Hz|kHz|MHz|"
    "W|kW|C|J|kJ|N|V|A|K|Pa|kPa|GB|MB|KB|kB|USD|EUR|GBP|dollars?|euros?|pounds?|rs|mol|rad|cal|kcal"
)
_FUNCTIONS = "and|sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod|arc[a-z]*"
_NUMBER = (
    r"(?:[-+] ?)?(?:\d[\d,]*(?:\.\d+)?(?: ?\\(?:times|cdot) ?10 ?\^ ?(?:\{-?\d+\}"
    r"|\d+))?|\.\d+|\d* ?\\[dtc]?frac\{[^{}]*\}\{[^{}]*\}|\d+ ?/ ?\d+)"
)
_POWER = r"(?:\^ ?\{?-?\d\}?)?"
_UNIT = (
    rf"(?:(?<= )(?:{_UNITS})"
    r"|(?<=[\d}])(?:[ckm]m|kg|mg|m[lL]|ft|lbs?|oz|mph|hrs?|km/h|m/s)"  # no space needed: not a product of letters
    rf"|(?<= )(?!(?:{_FUNCTIONS})\b)[A-Za-z]{{3,}}[A-Za-z ./-]*)"
)
_UNIT_AFTER_NUMBER = re.compile(
    rf"(?P<number>(?:^|[=<>≤≥] ?|\\approx ?){_NUMBER}) ?{_UNIT}"
    rf"\.?{_POWER}(?:(?: ?/ ?| ?\\cdot ?|[ *])(?:{_UNITS}|[A-Za-z]{{3,}}){_POWER})*$"
)
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathsf|mbox|operatorname) ?\{([^{}]*)\}"
_CHOICE = re.compile(  # matches \textbf{(C)}\ 12
    r"[\s$]*(?:\\(?:text|textbf|textrm|mathrm|mathbf|bold) ?\{\s*)?(?:\(([A-J])\)|([A-J])[.:)](?= |\\|\}))\s*\}?"
    r"(?:\\[ ,;:!]|\\q?quad(?![A-Za-z])|[~\s.:])*(?=[^\s.,;:!?}])"
)
_ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"(?<![\w.,])([1-9]\d*)(?:\.(\d+))? ({'|'.join(_ZEROS)})(?![A-Za-z])")
_ALIGNED = re.compile(r"\\begin\{(aligned|align\*?|gathered|split)\}")
_TEXT_BETWEEN = re.compile(r"^(?!.*\\begin)[^\\]*\d[^\\]*\\text ?\{(?! ?and ?\})[^{}]*[A-Za-z]{3}[^{}]*\}[^\\]*\d")
_DENIAL = re.compile(r"\b(?:not|never|neither|nor|cannot|more than|less than|fewer than|greater than)\b")
_SPACE = re.compile(r"\\(?:[,;:! ]|q?quad(?![A-Za-z]))")
_SEPARATORS = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!,|,\\!|\\ |~)(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d])(?!,\d)")
_BRACKETED = re.compile(r"[(\[{][^()\[\]{}]*,[^()\[\]{}]*[)\]}]")

# Matches most answers, which are canonical except for a backslash before the percent sign. The rules below would not
# change them.
_CANONICAL = re.compile(r"-?(?:\d+(?:\.\d+)?|\d+/\d+|\\[dt]?frac\{-?\d+\}\{\d+\})(?:\\?%)?", re.ASCII)

# Matches formulas that no rule of `plain` or `notation` changes, so most expressions skip these rules.
_ORDINARY = re.compile(
    r"(?:\\(?:[dt]?frac|sqrt|pi|cdot|times|left|right|cup)(?![A-Za-z])|(?<![+"
    r" ])\\infty(?![A-Za-z])|\\\{(?=[-\d]|\\(?!\}))|\\\}"
    r"|(?<![A-Za-z])[abcdefkmnrtxyz](?![A-Za-z])|\d|[-+/^()}]|\{(?![ ,]*\})|,(?!\d\d,)|(?<!\d) "
    r"|\[(?=[^\[\]]*[\])])|\](?!.*[\[\]]))*",
    re.ASCII,
)

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\$|\$|(?<!\\)\\[\[\]()]|[€£¥₹]", ""),  # removes currency signs and math delimiters
        (r"\\(?:left|right|displaystyle|textstyle|big|Big)(?![A-Za-z])\.?", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\n", " "),
        (r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degree|°|\bdegrees?\b)(?: ?(?:[CFK]|Celsius|Fahrenheit)\b)?", ""),
        (
            (
                r"(?<=[\d}%])"
                r" *[\u0400-\u0fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3][\u0400-\u0fff\u3040-\u9fff\uac00-\ud7a3 .]*$"
            ),
            "",
        ),
        (r"[\^_] ?\{ ?\}", ""),
        (r"\\%", "%"),
        (r" ?\b(?:percent(?:age points?)?|per cent|pct)\b", "%"),
        (r" +%", "%"),
        (r"^(?:US|USD|EUR|GBP|Rs\.?|R|BRL|CHF) ?(?=[-\d.])", ""),
        (r"\*\*", "^"),
        (r"\^ ?(-\d+)", r"^{\1}"),
        (r"√ ?(\d+|\([^()]*\)|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"^[A-Za-z] ?\\approx ?(?=[\d-])", ""),
        (r"^(?:\\approx|\\sim|=|:|≈)+ ?", ""),
    )
)


def normalize_answer(text: str) -> str:
    """Return the canonical form of an answer, the same for all spellings in the module docstring."""
    return canonical_number(text) or _by_rules(text.strip())


def canonical_number(text: str) -> str:
    """Return the text if it is a number without a unit in canonical form, else ""."""
    text = text.strip()
    return text.replace("\\%", "%") if len(text) <= TAIL and _CANONICAL.fullmatch(text) else ""


def _by_rules(text: str) -> str:
    if len(text) > TAIL and not is_prose(text):  # the end of a long text is another answer
        return ""
    is_ordinary = len(text) <= TAIL and _ORDINARY.fullmatch(text) is not None
    if not is_ordinary:
        text = rewrite(_last_row(plain(text[-TAIL:]).translate(_CHARACTERS)))
    if choice := _CHOICE.match(text):
        letter, value = choice[1] or choice[2], normalize_answer(text[choice.end() :])
        return f"({letter}) {value}" if value else letter
    text = re.sub(_TEXT, _unwrap_if_prose, text)
    if is_prose(text):
        text = read_marked(text) or ""
    text = _SEPARATORS.sub("", text)
    # Remove \text{...} next to an expression (a unit, a remark). Unwrap it if there is nothing else.
    without = re.sub(rf"{_TEXT}{_POWER}", _conjunction, text)
    has_more = re.search(r"[\dA-Za-z]", _SPACE.sub("", without))
    text = without if has_more else re.sub(_TEXT, r"\1", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text.strip())
    text = _join_thousands(_strip_ends(text))
    # 1.5 million becomes 1500000.
    text = _SCALED.sub(lambda match: f"{Decimal(f'{match[1]}.{match[2] or 0}e{_ZEROS[match[3]]}'):f}", text)
    text = _UNIT_AFTER_NUMBER.sub(r"\g<number>", text)
    text = _strip_ends(re.sub(r" {2,}", " ", text))
    return text if is_ordinary else rewrite_phrase(text)


def _last_row(text: str) -> str:
    """Keep only the last of several aligned equations."""
    if "\\begin" not in text or not (start := _ALIGNED.search(text)):
        return text
    body, _, after = text[start.end() :].partition(rf"\end{{{start[1]}}}")
    *_, row = ("", *(row for row in body.split("\\\\") if row.strip()))
    return text[: start.start()] + row.replace("&", "") + after


def _unwrap_if_prose(match: re.Match[str]) -> str:
    r"""Unwrap a `\text{...}` that belongs to the answer: it has a number, a denial, or words between numbers."""
    is_part = re.search(r"\d", match[1]) or _DENIAL.search(match[1])
    is_part = is_part or (re.search(r"[A-Za-z]{3}", match[1]) and _TEXT_BETWEEN.search(match.string))
    return f" {match[1]} " if is_part else match[0]


def _conjunction(match: re.Match[str]) -> str:
    word = match[1].strip().lower()
    if word in ("and", "or"):
        return f" {word} "
    if len(match[1]) == 1:  # a symbol such as \mathrm{e} or \mathbf{v}
        return match[1]
    return "%" if word in ("percent", "%") else " "


def _strip_ends(text: str) -> str:
    text = text.strip(" \n").rstrip(".,;:\\ ").lstrip(",;: ")
    while len(text) > 2 and text[0] == "{" and text[-1] == "}" and "{" not in text[1:]:
        text = text[1:-1].strip()
    choice = re.fullmatch(r"\(([A-Za-z])\)|([A-Z])[.:)]", text)
    return (choice[1] or choice[2]) if choice else text


def _join_thousands(text: str) -> str:
    if re.fullmatch(r"[-+]? ?\d{1,3}(?: \d{3})+(?:\.\d+)?%?", text):
        return text.replace(" ", "")
    # In these brackets commas separate elements.
    lists = [match.span() for match in _BRACKETED.finditer(text) if ", " not in match[0]]

    def join(match: re.Match[str]) -> str:
        is_in_list = any(start <= match.start() < end for start, end in lists)
        return match[0].replace(",", ", " if is_in_list else "")

    return _THOUSANDS.sub(join, text)
