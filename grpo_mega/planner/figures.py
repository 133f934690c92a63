"""Figures: numbers that know their formula.

A formula is a lambda without parameters; the local variables that it names are its inputs. `--explain` and the JSON show the
source of the lambda, so they show exactly the computed formula.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, Literal

Number = int | float
Unit = Literal["B", "s", "tokens", "FLOP", ""]  # "": a plain number
Trust = Literal["exact", "estimate", "unproven"]  # unproven: no run has been compared with the formula

GIB = 2**30


@dataclass(frozen=True)
class TracedNumber:
    label: str
    value: Number
    unit: Unit
    inputs: Mapping[str, Number]  # inputs of the formula, keyed by name
    function: FunctionType | None  # if None, the operator joins the inputs
    trust: Trust = "estimate"
    operator: Literal[" + ", " * "] = " + "

    @property
    def gib(self) -> float:
        return self.value / GIB

    @property
    def formula(self) -> str:
        """Return a Python expression over the inputs that evaluates to the value."""
        if self.function is None:
            return self.operator.join(self.inputs) or "0"
        code = self.function.__code__
        return _lambdas(code.co_filename)[code.co_firstlineno]

    def at(self, **inputs: Number) -> float:
        """Return the formula's result with some of the inputs replaced."""
        assert self.function is not None
        values = {**self.inputs, **inputs}
        code = self.function.__code__
        cells = tuple(CellType(values[name]) for name in code.co_freevars)
        return float(FunctionType(code, self.function.__globals__, closure=cells)())

    def trusted(self, trust: Trust) -> TracedNumber:
        return replace(self, trust=trust)

    def as_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "value": self.value,
            "unit": self.unit,
            "formula": self.formula,
            "inputs": dict(self.inputs),
            "trust": self.trust,
        }


def figure(label: str, unit: Unit, formula: Callable[[], Number], trust: Trust = "estimate") -> TracedNumber:
    """Return the figure of a lambda. No other lambda may start on the same line."""
    assert isinstance(formula, FunctionType)
    cells = zip(formula.__code__.co_freevars, formula.__closure__ or (), strict=True)
    return TracedNumber(label, formula(), unit, {name: cell.cell_contents for name, cell in cells}, formula, trust)


def total(label: str, unit: Unit, parts: Iterable[TracedNumber]) -> TracedNumber:
    """Return the sum of the parts. Their labels name the inputs."""
    figures = list(parts)
    inputs = {_name(part.label): part.value for part in figures}
    assert len(inputs) == len(figures), [part.label for part in figures]
    return TracedNumber(label, sum(inputs.values()), unit, inputs, None)


def product(label: str, unit: Unit, trust: Trust = "estimate", **factors: Number) -> TracedNumber:
    """Return the product of the factors; 0 without factors."""
    return TracedNumber(label, math.prod(factors.values()) if factors else 0, unit, factors, None, trust, operator=" * ")


@functools.cache
def _name(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label.lower())


@functools.cache
def _lambdas(path: str) -> dict[int, str]:
    """Return the bodies of a file's lambdas, keyed by the line on which a lambda starts."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.lineno: ast.unparse(node.body) for node in ast.walk(tree) if isinstance(node, ast.Lambda)}
