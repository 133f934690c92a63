"""Figures: numbers that know their formula.

A formula is a lambda without parameters; the local variables that it names are its inputs. `--explain` and the JSON
show the source of the lambda, so they show exactly the computed formula.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, Literal

Number = int | float
Unit = Literal["B", "s", "tokens", ""]  # "": a plain number
Trust = Literal["exact", "estimate", "unproven"]  # unproven: no run has been compared with the formula

GIB = 2**30


@dataclass(frozen=True, eq=False)
class TracedNumber(float):
    """A float with its formula. Formulas and JSON use `value`, the number as it was computed: an int stays an int."""

    label: str
    value: Number
    inputs: Mapping[str, Number]  # inputs of the formula, keyed by name
    formula: str  # Python expression over the inputs that evaluates to the value
    unit: Unit = "B"
    trust: Trust = "estimate"
    function: Callable[[], Number] | None = None  # the formula's lambda; None for sums and products

    def __new__(cls, label: str, value: Number, *_: object, **__: object) -> TracedNumber:
        return super().__new__(cls, value)

    @property
    def gib(self) -> float:
        return self / GIB

    def at(self, **inputs: Number) -> float:
        """Return the formula's result with some of the inputs replaced."""
        return float(_call(self.function, {**self.inputs, **inputs}))

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("label", "value", "unit", "formula", "inputs", "trust")}


def figure(label: str, formula: Callable[[], Number], unit: Unit = "B", trust: Trust = "estimate") -> TracedNumber:
    """Return the figure of a lambda. No other lambda may start on the same line."""
    assert isinstance(formula, FunctionType)
    code = formula.__code__
    cells = zip(code.co_freevars, formula.__closure__ or (), strict=True)
    inputs = _untraced({name: cell.cell_contents for name, cell in cells})
    source = _lambdas(code.co_filename)[code.co_firstlineno]
    return TracedNumber(label, _call(formula, inputs), inputs, source, unit, trust, formula)


def total(label: str, parts: Iterable[TracedNumber], unit: Unit = "B") -> TracedNumber:
    """Return the sum of the parts. Their labels name the inputs."""
    figures = list(parts)
    inputs = {re.sub(r"\W", "_", part.label.lower()): part.value for part in figures}
    assert len(inputs) == len(figures), [part.label for part in figures]
    return TracedNumber(label, sum(inputs.values()), inputs, " + ".join(inputs) or "0", unit)


def product(label: str, unit: Unit = "B", trust: Trust = "estimate", **factors: Number) -> TracedNumber:
    """Return the product of the factors; 0 without factors."""
    inputs = _untraced(factors)
    value = math.prod(inputs.values()) if inputs else 0
    return TracedNumber(label, value, inputs, " * ".join(inputs) or "0", unit, trust)


def _untraced(inputs: Mapping[str, Number]) -> dict[str, Number]:
    return {name: number.value if isinstance(number, TracedNumber) else number for name, number in inputs.items()}


def _call(function: Callable[[], Number] | None, inputs: Mapping[str, Number]) -> Number:
    """Call a lambda with these values of the local variables that it names."""
    assert isinstance(function, FunctionType)
    cells = tuple(CellType(inputs[name]) for name in function.__code__.co_freevars)
    number: Number = FunctionType(function.__code__, function.__globals__, closure=cells)()
    return number


@functools.cache
def _lambdas(path: str) -> dict[int, str]:
    """Return the bodies of a file's lambdas, keyed by the line on which a lambda starts."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.lineno: ast.unparse(node.body) for node in ast.walk(tree) if isinstance(node, ast.Lambda)}
