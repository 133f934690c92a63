r"""Refuse answers whose value or form is too large to compute (`is_bounded`), before math-verify and sympy see them.

sympy computes 9^{9^{9}}, 1000000! and \binom{10^9}{5\cdot 10^8} as soon as it reads them, and math-verify's parser needs time
exponential in the depth of brackets. One pass over the text computes an upper bound on the digits of the value.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from functools import lru_cache
from math import log10
from types import FrameType

from grpo_mega.rewards.math.evaluated import tokenize

MAX_DEPTH = 10  # maximum depth of nested brackets
MAX_SIZE = 20_000.0  # maximum decimal digits of a value: 2^{50000} has 15,052 and is computed in milliseconds
MAX_EXPONENT_SIZE = 6.0  # maximum decimal digits of an exponent, for any base
_OF_SUMS = 0.31  # upper bound on the digits that each further operand adds to a sum


@lru_cache(maxsize=4096)
def is_bounded(text: str) -> bool:
    """Return whether the numbers and brackets of a normalized answer are small enough to parse and compute quickly."""
    try:
        _Sizes(text).read_group(0)
    except OverflowError:
        return False
    return True


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


class _Sizes:
    """Reads logarithms of absolute values, each at least 0. Raises OverflowError at the first that is too large."""

    def __init__(self, text: str) -> None:
        self._tokens = tokenize(text)
        self._next = 0

    def read_group(self, depth: int) -> float:
        """Read up to a closing bracket or the end. Return an upper bound on the size of the sums and products in it."""
        if depth > MAX_DEPTH:
            raise OverflowError
        sizes: list[float] = []
        while self._next < len(self._tokens):
            kind, text = self._tokens[self._next]
            self._next += 1
            if kind == "close":
                break
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
        if self._next < len(self._tokens) and self._tokens[self._next][0] == "power":
            self._next += 1
            size = max(size, _OF_SUMS) * 10 ** self._read_exponent(depth + 1)
        if size > MAX_EXPONENT_SIZE:
            raise OverflowError
        return size

    def _read_atom(self, depth: int) -> float:
        """Return the size of an argument: a group or one token."""
        if depth > MAX_DEPTH:
            raise OverflowError
        while self._next < len(self._tokens):
            kind, text = self._tokens[self._next]
            self._next += 1
            if kind == "open":
                return self.read_group(depth + 1)
            if kind == "number":
                return _size_of_literal(text)
            if kind != "sum":
                break
        return 0.0


def _size_of_literal(text: str) -> float:
    value = float(text[:300])  # a longer literal overflows a float
    return max(0.0, log10(value) if value else 0.0) + max(0, len(text.partition(".")[0]) - 300)


def _checked(size: float) -> float:
    if size > MAX_SIZE:
        raise OverflowError
    return size
