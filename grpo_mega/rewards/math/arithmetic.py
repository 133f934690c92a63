r"""Read the arithmetic in a normalized answer without computing it: is it left to the reader, and is it too large?

A policy that is rewarded for 40+11 in place of 51 stops calculating within a few steps. So if the gold answer consists
of plain numbers, a sum, difference, product or quotient of numerals does not count (`is_unevaluated`). A power,
factorial, binomial or radical counts, and so do 3\times 10^8, 6!-180 (one numeral) and a fraction in lowest terms. 2/4
is accepted for 1/2, but 84/2 is not accepted for 42. An answer that ends in an operator (`is_open`) is unfinished,
whatever the gold answer is.

sympy computes 9^{9^{9}}, 1000000! and \binom{10^9}{5\cdot 10^8} as soon as it reads them, and math-verify's parser
needs time exponential in the depth of brackets. `is_bounded` refuses such answers. One pass over the text computes an
upper bound on the digits of the value.
"""

import re
from collections.abc import Iterator
from enum import IntEnum
from fractions import Fraction
from functools import lru_cache
from math import log10

from grpo_mega.rewards.math.numbers import MAX_DIGITS, in_words, parse_number

MAX_DEPTH = 30  # maximum depth of nested brackets; a deeper answer counts as unevaluated
MAX_BOUNDED_DEPTH = 10  # maximum depth of nested brackets; a deeper answer is too large to parse
MAX_SIZE = 20_000.0  # maximum decimal digits of a value: 2^{50000} has 15,052 and is computed in milliseconds
MAX_EXPONENT_SIZE = 6.0  # maximum decimal digits of an exponent, for any base

_OPEN = re.compile(
    r"(?:[-+*/=<>^]|\\(?:times|cdot|div|pm|mp|leq?|geq?|neq?|approx|equiv|sim))[ ?_.]*\Z"
    r"|\A[ ?_]*(?:[*/=]|\\(?:times|cdot|div)(?![A-Za-z]))"
)
_SIGNS = re.compile(r"[-+] ?[({\[ ]*[-+]")
_OF_SUMS = 0.31  # upper bound on the digits that each further operand adds to a sum
_POWERS_OF_TEN = frozenset(10**power for power in range(1, 19))
_RELATION = r"[&=<>]|\\(?:cup|cap|in|leq?|geq?|neq?|approx|equiv|sim|pm|mp|quad|pmod|setminus)(?![A-Za-z])"
_SEPARATOR = re.compile(
    r"(?<![A-Za-z\\])[A-Za-z](?:_\w)? ?(?=[=<>]|\\(?:[lg]eq?|neq?|in)(?![A-Za-z]))"
    rf"|\\\\|\\(?:begin|end) ?\{{[a-z]*\*?\}}|\\[{{}}]|[,;()\[\]{{}}]|\\(?:infty|[lr]angle)(?![A-Za-z])"
    rf"|{_RELATION}|\b(?:and|or)\b"
)
_TOKENS = {
    "number": r"\d+(?:\.\d+)?|\.\d+",
    "space": r"\\(?:left|right)(?![A-Za-z])|[ _'$%~|]",
    "sum": r"[-+]",
    "product": r"[*/:]|\\(?:times|cdot|div|ast|star|bullet|over|bmod|mod)(?![A-Za-z])",
    "factorial": r"!",
    "power": r"\^",
    "open": r"\\\{|[({\[]|\\(?:lfloor|lceil|lvert|lbrace)(?![A-Za-z])",
    "close": r"\\\}|[)}\]]|\\(?:rfloor|rceil|rvert|rbrace)(?![A-Za-z])",
    "end": rf"\\\\|\\(?:begin|end) ?\{{[a-z]*\*?\}}|[,;]|{_RELATION}|(?<!\\)[A-Za-z]{{2,}}",
    "fraction": r"\\[dtc]?frac(?![A-Za-z])",
    "binomial": r"\\[dt]?binom(?![A-Za-z])",
    "root": r"\\sqrt(?![A-Za-z])",
    "loop": r"\\(?:i*nt|oint|sum|prod|lim)(?![A-Za-z])",
    "function": r"\\(?:log|ln|lg|gcd|max|min|(?:arc)?(?:sin|cos|tan|cot|sec|csc))(?![A-Za-z])",
    "letter": r"\\?[A-Za-z]+|.",
}
_TOKEN = re.compile("|".join(f"(?P<{name}>{pattern})" for name, pattern in _TOKENS.items()), re.DOTALL | re.ASCII)


@lru_cache(maxsize=1024)
def has_plain_numbers(gold: str) -> bool:
    """Return whether a gold answer is a plain number, or plain numbers in a list, an interval, a matrix or similar."""
    if parse_number(gold) or in_words(gold):
        return True
    parts = [part.strip() for part in _SEPARATOR.split(gold)]
    return any(parts) and all(part in ("", "-", "+") or parse_number(part) is not None for part in parts)


def is_open(text: str) -> bool:
    """Return whether an answer ends in an operator or an equals sign, or starts with one that needs a left side."""
    return _OPEN.search(text) is not None


def is_unevaluated(text: str, gold: str) -> bool:
    """Return whether an answer is arithmetic on numerals. The gold answer must have plain numbers."""
    if _SIGNS.search(text):
        return True
    last_sides = [part.rpartition("=")[2] for part in re.split(r"([,;])", text)]  # keeps 2 for a = 1 + 1 = 2
    is_fraction, number = "/" in gold or "frac" in gold, parse_number(gold)
    is_integer = is_fraction and number is not None and number.value.denominator == 1
    try:
        _Reader("".join(last_sides), is_fraction, is_integer).read_group(0)
    except _Unevaluated:
        return True
    return False


@lru_cache(maxsize=4096)
def is_bounded(text: str) -> bool:
    """Return whether the numbers and brackets of a normalized answer are small enough to parse and compute quickly."""
    try:
        _Sizes(text).read_group(0)
    except OverflowError:
        return False
    return True


_Token = tuple[str, str]  # kind and text


class _Tokens:
    """The tokens of a normalized answer without spaces. The kinds are the keys of _TOKENS, and "" after the end."""

    def __init__(self, text: str) -> None:
        tokens = [(match.lastgroup or "", match[0]) for match in _TOKEN.finditer(text) if match.lastgroup != "space"]
        self._tokens = [("", "")] * 2 + tokens[::-1]  # the next token is the last one

    def _peek(self, offset: int = 0) -> _Token:
        return self._tokens[-1 - offset]

    def _take(self) -> _Token:
        return self._tokens.pop() if self._peek()[0] else ("", "")

    def _take_group(self) -> Iterator[_Token]:
        """Yield the tokens up to a closing bracket or the end."""
        while (token := self._take())[0] not in ("", "close"):
            yield token

    def _take_after_signs(self) -> _Token:
        while self._peek()[0] == "sum":
            self._take()
        return self._take()


class _Unevaluated(Exception):
    """The answer has arithmetic on numerals."""


class _Kind(IntEnum):
    NUMERAL = 0  # a number, or a power or root of a number
    CLOSED_FORM = 1  # a factorial, a binomial or the value of a function
    LETTER = 2  # a variable, or a constant such as pi


_Operand = tuple[_Kind, Fraction | None]  # kind, and the value if it is an integer that is written out


class _Term:
    """The operands and operators since the last separator."""

    def __init__(self) -> None:
        self.operands: list[_Operand] = []
        self.has_operator = False
        self.is_after_operand = False

    def add(self, operand: _Operand | None) -> None:
        if operand is not None:
            self.operands.append(operand)
            self.is_after_operand = True

    def change_last(self, kind: _Kind | None) -> None:
        """Forget the value of the last operand. Change its kind if one is given."""
        if self.operands:
            self.operands[-1] = (self.operands[-1][0] if kind is None else kind, None)

    def add_operator(self) -> None:
        self.has_operator, self.is_after_operand = True, False

    def finish(self) -> _Operand | None:
        """Return the operand that the term evaluates to, if any. Raises _Unevaluated."""
        kinds = [kind for kind, _ in self.operands]
        if self.has_operator and (kinds.count(_Kind.NUMERAL) > 1 or _Kind.LETTER in kinds):
            raise _Unevaluated
        return self.operands[0] if len(kinds) == 1 else (max(kinds), None) if kinds else None


class _Reader(_Tokens):
    """Reads an answer once, from left to right. Raises _Unevaluated at the first arithmetic on numerals."""

    def __init__(self, text: str, is_gold_fraction: bool, is_gold_integer: bool) -> None:
        super().__init__(text)
        self._is_gold_fraction = is_gold_fraction
        self._is_gold_integer = is_gold_integer  # \frac{2}{1} is such a gold answer
        self._is_argument = False  # True inside the argument of a function, where \frac{\pi}{3} is allowed

    def read_group(self, depth: int) -> _Operand | None:
        """Read up to a closing bracket or the end, and return the operand that the group is, if any."""
        if depth > MAX_DEPTH:
            raise _Unevaluated
        term = _Term()
        for kind, text in self._take_group():
            if kind == "end":
                term.finish()
                term = _Term()
            elif kind == "sum":
                if term.is_after_operand:
                    term.add_operator()
            elif kind == "product":
                is_scientific = text != "/" and self._peek()[1] == "10" and self._peek(1)[0] == "power"
                if term.is_after_operand and is_scientific:
                    self._take(), self._take()  # 3 \times 10^8
                    self._read_atom(depth, is_argument=False)
                elif term.is_after_operand and text in "/:":
                    term.operands[-1] = self._fraction(term.operands[-1], self._read_atom(depth, is_argument=False))
                else:
                    term.add_operator()
            elif kind == "power":
                self._read_atom(depth, is_argument=False)
                term.change_last(None)
            elif kind == "factorial":
                term.change_last(_Kind.CLOSED_FORM)
            else:
                self._add_operand(term, kind, text, depth)
        return term.finish()

    def _add_operand(self, term: _Term, kind: str, text: str, depth: int) -> None:
        if kind == "number":
            term.add((_Kind.NUMERAL, _value(text)))
        elif kind == "open":
            is_product = term.is_after_operand and term.operands[-1][0] is not _Kind.LETTER
            operand = self.read_group(depth + 1)
            term.has_operator |= is_product and operand is not None
            term.add(operand)
        elif kind == "fraction":
            above, below = self._read_atom(depth), self._read_atom(depth)
            term.add(self._fraction(above, below))
        elif kind == "binomial":
            self._read_atom(depth), self._read_atom(depth)
            term.add((_Kind.CLOSED_FORM, None))
        elif kind == "root":
            if self._peek()[1] == "[":
                self._read_atom(depth)
            self._read_atom(depth)
            term.add((_Kind.NUMERAL, None))
        elif kind == "letter" and text == "x" and term.is_after_operand and self._peek()[0] in ("number", "open"):
            term.add_operator()  # x is a multiplication sign, as in 6 x 7
        elif kind == "loop":
            raise _Unevaluated
        elif kind == "function":
            self._is_argument, before = True, self._is_argument
            if self._peek()[0] == "open":
                self._read_atom(depth)
            self._is_argument = before
            term.add((_Kind.CLOSED_FORM, None))
        else:
            term.add((_Kind.LETTER, None))

    def _read_atom(self, depth: int, is_argument: bool = True) -> _Operand | None:
        """Read a group or a single token. If a number is an argument, as in \\frac12, read only one digit."""
        kind, text = self._take_after_signs()
        if kind == "open":
            return self.read_group(depth + 1)
        if kind == "number" and is_argument and len(text) > 1:
            self._tokens.append((kind, text[1:]))
            text = text[0]
        return (_Kind.NUMERAL, _value(text)) if kind == "number" else (_Kind.LETTER, None) if kind else None

    def _fraction(self, above: _Operand | None, below: _Operand | None) -> _Operand:
        """Return the operand that a quotient is. Raises _Unevaluated unless it is the normal way to write the value."""
        kinds = {operand[0] if operand else _Kind.LETTER for operand in (above, below)}
        if above and below and above[1] is not None and below[1]:
            value = above[1] / below[1]
            is_accepted = self._is_gold_fraction or below[1] in _POWERS_OF_TEN
            if value.denominator == below[1] or (is_accepted and (value.denominator > 1 or self._is_gold_integer)):
                return _Kind.NUMERAL, None
            raise _Unevaluated
        if kinds == {_Kind.NUMERAL} or (_Kind.LETTER in kinds and not self._is_argument):
            raise _Unevaluated
        return min(kinds), None


def _value(text: str) -> Fraction | None:
    return Fraction(text) if text.isdigit() and len(text) <= MAX_DIGITS else None


class _Sizes(_Tokens):
    """Reads logarithms of absolute values, each at least 0. Raises OverflowError at the first that is too large."""

    def read_group(self, depth: int) -> float:
        """Read up to a closing bracket or the end. Return an upper bound on the size of the sums and products in it."""
        if depth > MAX_BOUNDED_DEPTH:
            raise OverflowError
        sizes: list[float] = []
        for kind, text in self._take_group():
            if kind == "number":
                sizes.append(_size_of_literal(text))
            elif kind == "open":
                sizes.append(self.read_group(depth + 1))
            elif kind == "binomial":
                n, k = self._read_atom(depth), self._read_atom(depth)
                sizes.append(_checked(min(10 ** min(n, 9.0) * log10(2), 10 ** min(k, 9.0) * n)))
            elif kind == "factorial" and sizes:
                sizes.append(_checked(10 ** min(sizes[-1], 9.0) * sizes.pop()))
            elif kind == "power":
                base = sizes.pop() if sizes else 0.0
                sizes.append(_checked(max(base, _OF_SUMS) * 10 ** self._read_exponent(depth)))
        return _checked(sum(sizes) + _OF_SUMS * max(0, len(sizes) - 1))

    def _read_exponent(self, depth: int) -> float:
        """Return the size of an exponent; for 9^9^9 the size of the whole tower."""
        size = self._read_atom(depth + 1)
        if self._peek()[0] == "power":
            self._take()
            size = max(size, _OF_SUMS) * 10 ** self._read_exponent(depth + 1)
        return _checked(size, MAX_EXPONENT_SIZE)

    def _read_atom(self, depth: int) -> float:
        """Return the size of an argument: a group or one token."""
        if depth > MAX_BOUNDED_DEPTH:
            raise OverflowError
        kind, text = self._take_after_signs()
        return self.read_group(depth + 1) if kind == "open" else _size_of_literal(text) if kind == "number" else 0.0


def _size_of_literal(text: str) -> float:
    value = float(text[:300])  # a longer literal overflows a float
    return max(0.0, log10(value) if value else 0.0) + max(0, len(text.partition(".")[0]) - 300)


def _checked(size: float, limit: float = MAX_SIZE) -> float:
    if size > limit:
        raise OverflowError
    return size
