"""A reward for each step of a response by its arithmetic: 1 if all equations of the step hold, otherwise 0.

A step without equations has no reward. Verdicts: "steps_right", "steps_wrong" (at least one) and "no_steps" (no step
has an equation). A config in the folder above names it
`process_supervision/arithmetic_steps.py:arithmetic_steps`. Copy the file to write your own reward of steps.

An equation contains numbers (1,234, 0.5, .5, 50%), + - * / x × · ÷, brackets, \\frac, \\times, \\div, and equals signs.
The parser reads through Markdown, LaTeX and a unit after the last number. It computes exactly, with fractions; a
decimal also equals a quotient that rounds to it. It skips anything else (2x + 3 = 7, 5 apples + 3 apples = 8 apples,
2^3 = 8), because no verdict is better than a wrong one. Time is linear in the length of the text.
"""
# ruff: noqa: RUF001 -- the parser reads signs that look like other characters

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from grpo_mega.rewards import Score, Step, splitter

MAX_NUMBER = 30  # characters; longer numbers are skipped
MAX_TOKENS = 200  # longest expression
MAX_DEPTH = 20  # deepest nesting of brackets

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\|\\(?:begin|end)[ ]?\{[^{}]*\}", "\n"),
        (r"<<[^<>\n]*>>", ""),  # GSM8K's calculator annotations repeat the equation
        (r"(?m)^[ \t]*(?:(?:[-*+•>#]+|\(?\d{1,3}[.)])[ \t]+)+", ""),  # bullets, headings and numbers of list items
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boxed)[ ]?\{([^{}]*)\}", r" \1 "),
        (r"\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|\\[,;:! ()\[\]]|[$€£¥₹&]", ""),
        (r"\{,\}", ","),
        (r"\\%", "%"),
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\[dtc]?frac[ ]?\{([^{}]*)\}[ ]?\{([^{}]*)\}", r"((\1)/(\2))"),
    )
)
_TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"|(?P<boundary><=|>=|!=|:=|=>|->|\\\\|[\n.,;:?<>≤≥≠≈~→⇒—\"'`“”‘’…•])"
    r"|(?P<equals>==?)"
    r"|(?P<power>\*\*)"
    r"|(?P<operator>[-+*/−–×⋅·∙÷])"
    r"|(?P<open>[(\[])|(?P<close>[)\]])|(?P<percent>%)|(?P<word>[^\W\d_]+)|(?P<other>[^ \t\r\f\v\u00a0])"
)
_OPERATORS = str.maketrans("−–×⋅·∙÷", "--****/")
# Next to a number these words make it part of a larger expression.
_ARITHMETIC_WORDS = re.compile(
    "[a-z]|of|times|plus|minus|over|by|per|than|mod|modulo|divided|multiplied|squared|cubed|percent|hundred|thousand|million"
    "|billion|dozen|half|thirds|quarters|sqrt|root|log|ln|exp|sin|cos|tan|max|min|gcd|lcm|abs|sum|product",
    re.IGNORECASE,
)
_MAX_UNIT_WORDS = 6


@dataclass
class _Token:
    kind: str
    text: str
    is_spaced: bool  # True if white space comes before the token


@dataclass(frozen=True)
class _Expression:
    """An expression and its values: two if a percent sign can be read in two ways, none if the expression is
    undefined.
    """

    values: tuple[Fraction, ...]
    has_operator: bool
    has_division: bool
    places: int  # decimal places if the expression is a single decimal, otherwise 0
    end: int  # index of the next token


def arithmetic_steps(
    prompt: str, response: str, answer: str, extras: dict[str, Any], *, step_splitter: str = "blank-lines"
) -> Score:
    """Return rewards for the steps and none for the whole response."""
    steps: list[Step] = []
    start = 0
    for end in splitter(step_splitter)(response):
        holds = equations_hold(response[start:end])
        if holds is not None:
            steps.append(Step(end, float(holds)))
        start = end
    if not steps:
        return Score(None, "no_steps")
    return Score(None, "steps_right" if all(step.value for step in steps) else "steps_wrong", tuple(steps))


def equations_hold(text: str) -> bool | None:
    """Return whether every equation in `text` holds; None if no equation contains an operation."""
    found = [verdict for chain in _chains(_tokens(text)) if (verdict := _holds(chain)) is not None]
    return all(found) if found else None


def _holds(chain: list[_Expression | None]) -> bool | None:
    if not any(expression and expression.has_operator for expression in chain):
        return None
    links = [_equal(a, b) for a, b in pairwise(chain) if a is not None and b is not None]
    return all(links) if links else None


def _equal(a: _Expression, b: _Expression) -> bool:
    return any(x == y for x in a.values for y in b.values) or _rounds_to(a, b) or _rounds_to(b, a)


def _rounds_to(quotient: _Expression, rounded: _Expression) -> bool:
    if not (quotient.has_division and rounded.places):
        return False
    half = Fraction(1, 2 * 10**rounded.places)
    return any(abs(x - y) <= half for x in quotient.values for y in rounded.values)


def _chains(tokens: list[_Token]) -> Iterator[list[_Expression | None]]:
    """Yield a = b = c as [a, b, c]. None stands for a part that is no number or may belong to a larger expression."""
    chain: list[_Expression | None] = []
    start = 0  # first token that may belong to the next equals sign
    for index in [i for i, token in enumerate(tokens) if token.kind == "equals"]:
        middle = chain[-1] if chain else None
        if middle is None or middle.end != index:
            if chain:
                yield chain
            chain = [_left_of(tokens, start, index)]
        chain.append(_right_of(tokens, index + 1))
        start = index + 1
    if chain:
        yield chain


def _left_of(tokens: list[_Token], first: int, end: int) -> _Expression | None:
    """Return the expression that ends at `end` and starts at `first` or later; None if a part of it cannot be read."""
    start, depth = end, 0
    while start > first:
        kind = tokens[start - 1].kind
        if kind == "close":
            depth += 1
        elif kind == "open":
            depth -= 1
            if depth < 0:
                break
        elif kind not in ("number", "operator", "percent"):
            break
        start -= 1
    if start == end or depth > 0:
        return None
    before = tokens[start - 1] if start > first else None
    if before is not None and before.kind == "other":
        return None
    if before is not None and before.kind == "word":
        is_binary = tokens[start].kind == "operator" and (
            not tokens[start].is_spaced or start + 1 == end or tokens[start + 1].is_spaced
        )
        if is_binary or not tokens[start].is_spaced or _is_arithmetic(before):
            return None
    expression = _parse(tokens, start)
    return expression if expression is not None and expression.end == end else None


def _right_of(tokens: list[_Token], start: int) -> _Expression | None:
    """Return the longest expression from `start` on; None if the tokens after it may belong to it."""
    expression = _parse(tokens, start)
    if expression is None:
        return None
    rest = tokens[expression.end : expression.end + _MAX_UNIT_WORDS + 2]
    kinds = [token.kind for token in rest] + ["boundary"]
    if kinds[0] in ("boundary", "equals", "close"):
        return expression
    if kinds[0] == "open":
        return expression if kinds[1] == "word" else None  # a remark in brackets
    if kinds[0] != "word" or not rest[0].is_spaced:
        return None
    num_words = next(i for i, kind in enumerate(kinds) if kind != "word")
    if any(map(_is_arithmetic, rest[:num_words])) or kinds[num_words] in ("operator", "power", "other", "percent"):
        return None
    return expression


def _is_arithmetic(word: _Token) -> bool:
    return _ARITHMETIC_WORDS.fullmatch(word.text) is not None


def _tokens(text: str) -> list[_Token]:
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    found: list[_Token] = []
    end = 0
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "other"
        word = match[0]
        if kind == "operator":
            word = word.translate(_OPERATORS)
        elif kind == "number" and len(word) > MAX_NUMBER:
            kind = "other"
        found.append(_Token(kind, word, is_spaced=match.start() > end))
        end = match.end()
    return list(_resolve(found))


def _resolve(tokens: list[_Token]) -> Iterator[_Token]:
    """Decide which "*" and "x" are multiplications and which ":" may be a time or ratio. Join lines at "="."""
    last: _Token | None = None
    for index, token in enumerate(tokens):
        following = tokens[index + 1] if index + 1 < len(tokens) else None
        before = last.kind if last is not None else "boundary"
        after = following.kind if following is not None else "boundary"
        is_between = before in ("number", "close", "percent") and after in ("number", "open")
        if token.text == "\n" and "equals" in (before, after):
            continue
        if token.kind == "power" or token.text == "*":
            if not is_between and (before == "boundary" or after in ("boundary", "word") or token.kind == "power"):
                continue
            token.kind = "other" if token.kind == "power" else "operator"
        elif token.text in ("x", "X") and is_between:
            token.kind, token.text = "operator", "*"
        elif token.text == ":" and is_between and following is not None and not following.is_spaced:
            token.kind = "other"
        last = token
        yield token


class _Undefined(Exception):
    """A division by zero."""


class _NotNumbers(Exception):
    """There is no expression at this position, or it is too large."""


def _parse(tokens: list[_Token], start: int) -> _Expression | None:
    """Return the longest expression of numbers that starts at `start`."""
    try:
        parser = _Parser(tokens, start, Fraction(1, 100))
        values = parser.values()
    except _NotNumbers:
        return None
    used = tokens[start : parser.position]
    kinds = {token.kind for token in used}
    if "percent" in kinds:
        values += _Parser(tokens, start, Fraction(1)).values()
    places = len(used[-1].text.partition(".")[2]) if len(used) == 1 or (len(used) == 2 and parser.has_sign) else 0
    return _Expression(values, parser.has_operator, any(t.text == "/" for t in used), places, parser.position)


class _Parser:
    """A parser of sums of products of signed numbers and brackets, from left to right."""

    def __init__(self, tokens: list[_Token], start: int, percent: Fraction) -> None:
        self._tokens = tokens
        self._start = start
        self._percent = percent
        self.position = start
        self.has_operator = False
        self.has_sign = False

    def values(self) -> tuple[Fraction, ...]:
        """Return one value, or none if it is undefined."""
        try:
            return (self._sum(0),)
        except _Undefined:
            while self._kind() in ("number", "operator", "open", "close", "percent"):
                self.position += 1
            self.has_operator = True
            return ()

    def _kind(self, offset: int = 0) -> str:
        index = self.position + offset
        return self._tokens[index].kind if index < len(self._tokens) else "boundary"

    def _take(self) -> str:
        if self.position - self._start >= MAX_TOKENS:
            raise _NotNumbers
        self.position += 1
        return self._tokens[self.position - 1].text

    def _next_operator(self, signs: str) -> str | None:
        """Take one of these operators if an operand follows."""
        if self._kind() != "operator" or self._tokens[self.position].text not in signs:
            return None
        has_operand = self._kind(1) in ("number", "open") or (
            self._kind(1) == "operator"
            and self._tokens[self.position + 1].text in "+-"
            and self._kind(2) in ("number", "open")
        )
        if not has_operand:
            return None
        self.has_operator = True
        return self._take()

    def _sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while sign := self._next_operator("+-"):
            operand = self._product(depth)
            value = value + operand if sign == "+" else value - operand
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while sign := self._next_operator("*/"):
            operand = self._factor(depth)
            if sign == "/" and operand == 0:
                raise _Undefined
            value = value * operand if sign == "*" else value / operand
        return value

    def _factor(self, depth: int) -> Fraction:
        factor = Fraction(1)
        if self._kind() == "operator" and self._tokens[self.position].text in "+-":
            self.has_sign = True
            factor = Fraction(-1) if self._take() == "-" else factor
        if self._kind() == "open" and depth < MAX_DEPTH:
            self._take()
            value = self._sum(depth + 1)
            if self._kind() != "close":
                raise _NotNumbers
            self._take()
        elif self._kind() == "number":
            value = Fraction(self._take().replace(",", ""))
        else:
            raise _NotNumbers
        if self._kind() == "percent":
            self._take()
            factor *= self._percent
        return factor * value
