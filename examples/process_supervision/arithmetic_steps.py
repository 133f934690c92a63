"""The reward of a response's steps by their arithmetic: 1 for a step whose equations all hold, 0 for one where one does not.

A step without equations has no reward of its own. Verdicts: "steps_right", "steps_wrong" (one or more) and "no_steps" (no step
has an equation). A config names this function `arithmetic_steps`; copy the file to write a reward of steps of your own.

The equations are those between numbers in running text: numbers (1,234, 0.5, .5, 50%), + - * / x × · ÷, brackets, \\frac,
\\times, \\div, and chains of equals signs, through Markdown, LaTeX and units after the last number. They are computed exactly,
in fractions; a decimal also equals a quotient that rounds to it. Anything that is not all numbers (2x + 3 = 7, 5 apples +
3 apples = 8 apples, 2^3 = 8) is passed over: better no verdict than a wrong one. Time is linear in the text's length.
"""
# ruff: noqa: RUF001 -- the signs that look like others are what is read

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from grpo_mega.rewards.api import Score, Step
from grpo_mega.rewards.steps import splitter

MAX_NUMBER = 30  # characters of a number that is worth arithmetic
MAX_TOKENS = 200  # of an expression
MAX_DEPTH = 20  # of its brackets

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
# Beside a number these make it part of a larger expression.
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
    is_spaced: bool  # white space stands before it


@dataclass(frozen=True)
class _Expression:
    """The values of an expression: more than one where a percent sign can be read in two ways, none if it is undefined."""

    values: tuple[Fraction, ...]
    has_operator: bool
    has_division: bool
    places: int  # after the point, if it is a single decimal; else 0
    end: int  # the token after it


def arithmetic_steps(
    prompt: str, response: str, answer: str, extras: dict[str, Any], *, step_splitter: str = "blank-lines"
) -> Score:
    """Return rewards of the steps alone."""
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
    """Return whether every equation in `text` holds; None if it has none with an operation in it."""
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
    """Yield a = b = c as [a, b, c], with None for what is not a number or may be part of something larger."""
    chain: list[_Expression | None] = []
    start = 0  # of what belongs to the next equals sign
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
    """Return the expression that ends at `end`, unless more belongs to it than can be read; look back to `first` only."""
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
    """Return the longest expression from `start` on, unless what follows may belong to it."""
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
    """Tell signs of arithmetic from Markdown's stars and from letters, and times of day from ratios; join lines at "="."""
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
    """No expression stands here, or one that is too large."""


def _parse(tokens: list[_Token], start: int) -> _Expression | None:
    """Return the longest expression of numbers that begins at `start`."""
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
    """Sums of products of signed numbers and brackets, from left to right."""

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
            self._kind(1) == "operator" and self._tokens[self.position + 1].text in "+-" and self._kind(2) in ("number", "open")
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
