"""Find the answer of a response, and bring its text into canonical form.

`locate_answer`, then `read_located`, find the answer as text. Only the text after the thought (`</think>`) counts, or
the whole text if there is no thought. A response that was cut off inside its thought has no answer. Pass `whole_turn`:
if the chat template opens the thought, the response itself has no `<think>`.

The first of these that exists is the answer:
- the last complete `<answer>...</answer>`;
- the last `\\boxed{...}` with balanced braces, or several that a comma or "and" joins;
- the rest of the line after the last `####`, unless it is a heading with text below it;
- the answer that the text states (`prose`).

If the last box is never closed, there is no answer. In a response that was cut at the length limit, only these count: a
closed box or tag, a complete `####` line, and an announced answer with the text after it. The last expression does not
count.

Gold answers are read by the same rules, so a bare `1/2`, a worked solution ending in `#### 18` and one ending in
`\\boxed{18}` all work. Time is linear in the length of the text.

`normalize_answer` brings it into canonical form, for exact comparison or for math-verify. Input: text from
`read_located`. Output: one line of LaTeX-like text, "" if nothing is left. Removed are words around the expression,
math delimiters, Markdown, LaTeX spacing, currency signs, units, degree signs, thousands separators and a final full
stop. Kept are the percent sign as `%` (whether it matters depends on the other answer), `x = `, brackets and letters.

A comma in `1,234` separates thousands. In brackets it separates elements: (100,200) is a pair and [1,234] an interval.
In brackets it separates thousands only if another comma has a space after it: (1,234, 5). `1{,}000`, `1\\,000` and
`1,\\!000` are always one number, and so is `10 000` if it is the whole answer.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from grpo_mega.rewards.math.notation import plain, rewrite, rewrite_phrase, rules
from grpo_mega.rewards.math.prose import (
    TAIL,
    is_prose,
    other_answer,
    read_announced,
    read_marked,
    read_passage,
    read_start,
)

_THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
)
_TOKEN = re.compile(r"\\(?:boxed|fbox|framebox|bbox) *(?:\[[^\]]{0,60}\] *){0,2}\{|\\.|[{}]", re.DOTALL)
_COMMAND = re.compile(r"\\(?:boxed|fbox|framebox|bbox)")
_UNBRACED = re.compile(r"\\(?:boxed|fbox) *(?=[^ {}])")
_JOIN = re.compile(
    r"\}[\s$]*(?:[,;]\s*(?:(?:and|or)\b)?|(?:and|or)\b|\\text ?\{ ?(?:and|or) ?\})[\s$]*(?:[A-Za-z] ?= ?)?"
    r"\\(?:boxed|fbox|framebox) *\{$"
)
_JOIN_OPEN = re.compile(
    r"(?:[,;]|[,;]?\s*(?:an?d?|or?\b|\\text ?\{ ?(?:and|or) ?\}))[\s$]*(?:[A-Za-z] ?= ?)?(?:\\[a-z]*)?"
)
_JOIN_CHARS, _MAX_JOINED = 40, 10
_NUMBERED, _BEFORE_NUMBER = re.compile(r"\d+[.)]\s"), re.compile(r"[-$€£\\(*_ ]*\d")
_MAX_HASHED = 400  # length limit of a line after ####; a longer line is not an answer


def whole_turn(response: str, extras: Mapping[str, Any]) -> str:
    """Return the assistant's turn: the text that the chat template wrote into it (extras["prefill"]), then the
    response.
    """
    return str(extras.get("prefill") or "") + response


def locate_answer(response: str, is_cut: bool = False) -> tuple[str | None, str]:
    """Return (the text marked as the answer, ""), or (None, the text that may state it).

    If the response `is_cut` at the length limit, only a complete mark counts. No regex that could backtrack over the
    whole text is used.
    """
    conclusion = conclusion_of(response)
    _, is_tagged, tagged = conclusion.rpartition("</answer>")[0].rpartition("<answer>")
    text = tagged.partition("</answer>")[0] if is_tagged else conclusion
    is_cut = is_cut and not is_tagged
    marked = _boxed(text, is_cut)
    if marked is None:
        marked = _hashed(text, is_cut)
    if marked is None and is_tagged:
        marked = text
    return (None, conclusion) if marked is None else (marked, "")


def read_located(marked: str | None, conclusion: str, is_cut: bool = False) -> str | None:
    """Return the answer from the result of `locate_answer`, stripped but otherwise unchanged; None if there is none."""
    if marked is not None:
        return marked.strip() or None
    return read_announced(conclusion) if is_cut else read_passage(conclusion)


def conclusion_of(response: str) -> str:
    """Return the text after the last thought; "" if that thought does not end."""
    if "<" not in response and "[" not in response:
        return response
    for opening, closing in _THOUGHTS:
        end = response.rfind(closing)
        if response.rfind(opening) > end:
            return ""
        if end >= 0:
            response = response[end + len(closing) :]
    return response


def _hashed(text: str, is_cut: bool) -> str | None:
    """Return the rest of the line after the last `####`; None if it is a title, too long, or may be cut off."""
    _, mark, rest = text.rpartition("####")
    line, end, below = rest.partition("\n") if mark else ("", "", "")
    line = line.strip()
    if not line or len(line) > _MAX_HASHED or (is_cut and not end):
        return None
    is_title = line.isalpha() or is_prose(plain(line))
    is_title = bool(_NUMBERED.match(line)) or (is_title and not _BEFORE_NUMBER.match(line))
    return None if is_title and below.strip() else line


def _boxed(text: str, is_cut: bool) -> str | None:
    r"""Return the content of the last box, or of several joined ones: "\boxed{3} and \boxed{5}" returns "3, 5".

    Return "" if the last box is never closed, because the answer was then cut off.
    """
    start = _last_command(text, len(text))
    if start < 0:
        return None
    last = _closed_box(text, start)
    if last is None:
        if unbraced := _UNBRACED.match(text, start):  # handles \boxed 5
            rest = text[unbraced.end() : unbraced.end() + _MAX_HASHED]
            found = read_start(rest)
            if found is not None:
                return "" if is_cut and len(rest) == len(found) else found
        if _content_of(text, start):
            return ""
        last = _last_boxed_of_all(text)
    if last is None:
        return None
    if is_cut and _JOIN_OPEN.fullmatch(text[last[1] + 1 :][:_MAX_HASHED].strip("$ \n")):
        return ""
    contents, end = [text[slice(*last)].strip()], last[1]
    for _ in range(_MAX_JOINED):
        first = max(0, last[0] - _JOIN_CHARS)
        join = _JOIN.search(text, first, last[0]) if "}" in text[first : last[0]] else None
        before = _last_command(text, join.start()) if join else -1
        joined = _closed_box(text, before) if before >= 0 else None
        if not join or not joined or joined[1] != join.start():
            break
        last = joined
        if (content := text[slice(*last)].strip()) not in contents:
            contents.insert(0, content)
    other = other_answer(contents[-1], text[end + 1 :])
    return ", ".join(contents) if other is None or other in contents else f"{contents[-1]} or {other}"


def _last_command(text: str, end: int) -> int:
    r"""Return the index of the last \boxed or \fbox before `end`, or -1."""
    return max((command.start() for command in _COMMAND.finditer(text, 0, end)), default=-1)


def _closed_box(text: str, start: int) -> tuple[int, int] | None:
    """Return the span of the content of the box at `start`; None if it is not closed."""
    first = _content_of(text, start)
    if not first:
        return None
    end = text.find("}", first)
    if text.find("{", first, end) < 0 and text.find("\\", first, end) < 0:  # the usual case
        return (first, end) if end >= 0 else None
    depth = 1
    for token in _TOKEN.finditer(text, first):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if not depth:
            return first, token.start()
    return None


def _content_of(text: str, start: int) -> int:
    """Return the index of the content of the box that opens at `start`; 0 if none does."""
    box = _TOKEN.match(text, start)
    num_backslashes = start - len(text[:start].rstrip("\\"))
    return box.end() if box is not None and box[0][-1] == "{" and num_backslashes % 2 == 0 else 0


def _last_boxed_of_all(text: str) -> tuple[int, int] | None:
    """Return the span of the content of the last closed box, in one pass. For texts whose last box is never closed."""
    last: tuple[int, int] | None = None
    open_braces: list[int] = []  # index after each open brace; -1 if the brace does not open a box
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start > 0 and (last is None or start > last[0]):
                last = (start, token.start())
        elif token[0] == "{":
            open_braces.append(-1)
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_braces.append(token.end())
    return last


# ruff: noqa: RUF001 -- this module normalizes characters that look like others


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
    r"(?:[-+] ?)?(?:\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+| ?\\(?:times|cdot) ?10 ?\^ ?(?:\{-?\d+\}"
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
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathsf|mathtt|texttt|mbox|operatorname) ?\{([^{}]*)\}"
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
_PLAIN_SET = re.compile(r"\{(?! *[1-9]\d{0,2}(?:,\d{3})+ *\})[^=,{}]+(?:,[^=,{}]+)+\}")
_BRACKETED = re.compile(r"[(\[{][^()\[\]{}]*,[^()\[\]{}]*[)\]}]")

# Matches most answers, which are canonical except for a backslash before the percent sign. The rules below would not
# change them.
_CANONICAL = re.compile(r"-?(?:\d+(?:\.\d+)?|\d+/\d+|\\[dt]?frac\{-?\d+\}\{\d+\})(?:\\?%)?", re.ASCII)

# Matches formulas that no rule of `plain` or `notation` changes, so most expressions skip these rules.
_ORDINARY = re.compile(
    r"(?:\\(?:[dt]?frac|sqrt|pi|cdot|times|left|right|cup)(?![A-Za-z])|(?<![+"
    r" ])\\infty(?![A-Za-z])|\\\{(?=[-\d]|\\(?!\}))|\\\}"
    r"|(?<![A-Za-z])[abcdefkmnrtxyz](?![A-Za-z])|\d|[-+/^()}]|\{(?![ ,]*\})|,(?!\d\d,)|(?<!\d) "
    r"|\[(?=[^\[\]]*[\])][^\[]*$)|\](?!.*[\[\]]))*",
    re.ASCII,
)

_REWRITES = rules(
    {
        r"\\\$|\$|(?<!\\)\\[\[\]()]|[€£¥₹]": "",  # removes currency signs and math delimiters
        r"\\(?:left|right|displaystyle|textstyle|big|Big)(?![A-Za-z])\.?": "",
        r"(?<!\\)\\!": "",
        r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\n": " ",
        r" ?(?:\^ ?\{? ?\\circ ?\}?|\\degree|°|\bdegrees?\b)(?: ?(?:[CFK]|Celsius|Fahrenheit)\b)?": "",
        (
            r"(?<=[\d}%])"
            r" *[\u0400-\u0fff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3][\u0400-\u0fff\u3040-\u9fff\uac00-\ud7a3 .]*$"
        ): "",
        r"[\^_] ?\{ ?\}": "",
        r"\\%": "%",
        r" ?\b(?:percent(?:age points?)?|per cent|pct)\b": "%",
        r" +%": "%",
        r"^(?:US|USD|EUR|GBP|Rs\.?|R|BRL|CHF) ?(?=[-\d.])": "",
        r"\*\*": "^",
        r"\^ ?(-\d+)": r"^{\1}",
        r"(?<=\d[eE])\{ ?([-+]?\d+) ?\}": r"\1",
        r"√ ?(\d+|\([^()]*\)|[A-Za-z])": r"\\sqrt{\1}",
        r"(?<![A-Za-z\\])pi(?![A-Za-z])": r"\\pi ",
        r"^[A-Za-z] ?\\approx ?(?=[\d-])": "",
        r"^(?:\\approx|\\sim|=|:|≈)+ ?": "",
    }
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
        if _PLAIN_SET.fullmatch(text):
            return rf"\{text[:-1]}\}}"
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
