r"""math-verify for the accuracy reward: `parse` and `verify`, without timeouts. The import takes one to two seconds.

Most of math-verify's time goes into its parser, ANTLR in Python. The parser's decisions depend only on the token types,
so the decisions for 5x^2+3 are reused for 7y^2+4. A new form is first parsed without the rule stack ("SLL"), which
returns the same tree or a syntax error. Only after an error is it parsed with the stack ("LL"), which is much slower.
Comparing wrong answers is mostly sympy's `simplify`, so it is not called if values at one point differ.

The import builds the parser's tables from common forms of answers. Raises ImportError if math-verify cannot be used.
"""

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Iterator
from functools import lru_cache, partial
from types import FrameType
from typing import Any

import math_verify
from sympy import Derivative, Expr, I, Limit, Rational, Symbol  # type: ignore[import-untyped]
from sympy.concrete.expr_with_limits import ExprWithLimits  # type: ignore[import-untyped]

_NUM_DECISIONS = 4096  # number of token sequences whose decisions are remembered
_DIGITS, _CLEARLY = 15, 1e-6  # digits to compute of a value, and the relative difference that counts as different

# Pairs of answers in common forms.
_FORMS = r"""
x + 1                              ~ 1 + x
\frac{3\sqrt{2}}{2}                ~ \frac{3}{\sqrt{2}}
2x^2-3xy+4                         ~ 4-3xy+2x^{2}
(3,-5)                             ~ (3,\frac{1}{2})
[0,\infty)                         ~ (-\infty,0]\cup[2,5)
\{1,2\}                            ~ 2,1
\frac{\pi}{4}                      ~ 2\pi
x<5                                ~ 1\leq x\leq 2
3\pm 2\sqrt{5}                     ~ 1+2i
\begin{pmatrix}1\\2\end{pmatrix}   ~ \begin{pmatrix}1&0\\0&1\end{pmatrix}
2^{10}                             ~ 5!\cdot 3
\sqrt[3]{4}                        ~ \left|-2\right|
(x+1)(x-2)                         ~ \frac{x+1}{x-2}
x^3-2x^2+x-1                       ~ -x^2+3x
\frac{1+\sqrt{5}}{2}               ~ 2\sqrt{3}-1
-\frac{2\pi}{3}                    ~ 24-4\pi
\frac{3}{4}\pi                     ~ \sqrt{15}
\left(-\frac{1}{2},\sqrt{3}\right) ~ (1,2,x)
[-1,\sqrt{2}]                      ~ (-2,\pi]
\{-1,\frac{1}{2},\sqrt{2}\}        ~ \{x,3\}
"""


def parse_answer(text: str) -> tuple[Any, ...]:
    """Return math-verify's readings of a normalized answer, taken as one LaTeX formula; () if it cannot read the
    answer.
    """
    if not text:
        return ()
    # With units=True math-verify would read "3t" as "3". Its search for boxes and its fallback to a string would
    # extract a second time.
    config = math_verify.LatexExtractionConfig(
        boxed_match_priority=-1,
        normalization_config=math_verify.LatexNormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
        ),
    )
    latex = text.replace("%", r"\%")
    return tuple(math_verify.parse(f"${latex}$", [config], fallback_mode="no_fallback", parsing_timeout=None))


def is_equal_answer(gold: tuple[Any, ...], response: tuple[Any, ...]) -> bool:
    """Return whether any reading of the response equals any reading of the gold answer."""
    if math_verify.verify(list(gold), list(response), allow_set_relation_comp=True, timeout_seconds=None):
        return True
    return any(_equal_as_complex(a, b) for a in gold for b in response)


class _TimeUp(BaseException):
    """The processor time is used up. Not an Exception, because libraries catch every Exception."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Leave the block once it has used this much processor time. No effect outside the main thread of a process."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _TimeUp

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, end)
    # The signal repeats, in case a finally block swallowed the first one.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds / 10)
    try:
        with contextlib.suppress(_TimeUp):
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _parse_each_form_once() -> None:
    from antlr4 import PredictionMode  # type: ignore[import-untyped]
    from latex2sympy2_extended import latex2sympy2

    converter = latex2sympy2._Latex2Sympy
    create_parser = converter.create_parser

    @lru_cache(maxsize=_NUM_DECISIONS)
    def decisions_of(form: tuple[int, ...]) -> list[int]:
        """Return the list of decisions for these token types. The first parse fills it."""
        return []

    def parse(self: Any, latex: str, parser: Any) -> Any:
        tokens = parser.getTokenStream()
        tokens.fill()
        decisions = decisions_of(tuple(token.type for token in tokens.tokens))
        if decisions:
            replayed = iter(decisions)
            parser._interp.adaptivePredict = lambda *_: next(replayed)
            return type(parser).math(parser)
        try:
            tree, decisions[:] = _decide(parser, PredictionMode.SLL)
        except Exception:
            tree, decisions[:] = _decide(create_parser(self, latex), PredictionMode.LL)
        return tree

    def create(self: Any, latex: str) -> Any:
        parser = create_parser(self, latex)
        parser.math = lambda: parse(self, latex, parser)
        return parser

    converter.create_parser = create


def _decide(parser: Any, mode: Any) -> tuple[Any, list[int]]:
    """Return the tree, and the alternatives that the parser chose."""
    parser._interp.predictionMode = mode
    choose = parser._interp.adaptivePredict
    decisions: list[int] = []

    def choose_and_note(*arguments: Any) -> int:
        decisions.append(choose(*arguments))
        return decisions[-1]

    parser._interp.adaptivePredict = choose_and_note
    return type(parser).math(parser), decisions


def _read_numbers_once() -> None:
    """Cache numbers, because sympy evaluates Python code for "5", which takes half a millisecond."""
    from latex2sympy2_extended import latex2sympy2

    converter = latex2sympy2._Latex2Sympy
    number = lru_cache(maxsize=1024)(partial(converter.parse_number, converter()))
    converter.parse_number = lambda self, text: number(text)


def _refute_by_numbers() -> None:
    from math_verify import grader

    symbolic_eq = grader.sympy_symbolic_eq
    grader.sympy_symbolic_eq = lambda a, b: not _differ_at_a_point(a, b) and bool(symbolic_eq(a, b))


def _equal_as_complex(a: Any, b: Any) -> bool:
    """Return whether two constants in i have the same value. math-verify takes i for a variable."""
    if not (isinstance(a, Expr) and isinstance(b, Expr)):
        return False
    symbols = a.free_symbols | b.free_symbols
    if {symbol.name for symbol in symbols} != {"i"}:
        return False
    unit = {symbol: I for symbol in symbols if isinstance(symbol, Symbol)}
    try:
        difference = complex((a.subs(unit) - b.subs(unit)).evalf(_DIGITS * 2, maxn=200))
        return abs(difference) < 1e-12 * max(1.0, abs(complex(a.subs(unit).evalf(_DIGITS))))
    except Exception:
        return False


def _differ_at_a_point(a: Any, b: Any) -> bool:
    """Return whether two expressions clearly have different real values at one point, so they cannot be equal."""
    try:
        if not (isinstance(a, Expr) and isinstance(b, Expr)):
            return False
        if any(side.has(ExprWithLimits, Derivative, Limit) for side in (a, b)):  # evaluating an integral can take long
            return False
        symbols = sorted(a.free_symbols | b.free_symbols, key=str)
        if not all(type(symbol) is Symbol for symbol in symbols):
            return False
        point = {symbol: Rational(1000 + 37 * place, 1283) for place, symbol in enumerate(symbols)}
        left, right = (complex(side.evalf(_DIGITS, subs=point)) for side in (a, b))
        if left.imag or right.imag or not (math.isfinite(left.real) and math.isfinite(right.real)):
            return False
        return abs(left.real - right.real) > _CLEARLY * max(1.0, abs(left.real), abs(right.real))
    except Exception:
        return False


for _name in ("math_verify", "latex2sympy2_extended"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
for _speed_up in (_parse_each_form_once, _read_numbers_once, _refute_by_numbers):
    # A version of math-verify without these hooks is equally right, only slower.
    with contextlib.suppress(ImportError, AttributeError):
        _speed_up()
try:
    for _line in _FORMS.strip().splitlines():
        is_equal_answer(*(parse_answer(_side.strip()) for _side in _line.split("~")))
except Exception as error:
    raise ImportError(f"math-verify cannot be used: {type(error).__name__}: {error}") from error
