"""Figures: numbers that know the formula they come from.

A formula is an ordinary function of named numbers, with one return statement: `--explain` and the JSON show that statement, so
that they show what was computed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec

Number = int | float
Unit = Literal["B", "s", "tokens", "FLOP", ""]  # "": a plain number
Trust = Literal["exact", "estimate", "unproven"]  # unproven: by a formula that no run has been compared with

GIB = 2**30
P = ParamSpec("P")


@dataclass(frozen=True)
class Figure:
    label: str
    value: Number
    unit: Unit
    inputs: Mapping[str, Number]  # of the formula, by name
    function: Callable[..., Number] | None  # None: the inputs joined by the operator
    trust: Trust = "estimate"
    operator: Literal[" + ", " * "] = " + "

    @property
    def gib(self) -> float:
        return self.value / GIB

    @property
    def formula(self) -> str:
        """Return a Python expression over the inputs that evaluates to the value."""
        return _expression(self.function) if self.function else self.operator.join(self.inputs) or "0"

    def at(self, **inputs: Number) -> float:
        """Return what the formula gives with some of the inputs replaced."""
        assert self.function is not None
        return float(self.function(**{**self.inputs, **inputs}))

    def trusted(self, trust: Trust) -> Figure:
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


def formula(label: str, unit: Unit = "", trust: Trust = "estimate") -> Callable[[Callable[P, Number]], Callable[P, Figure]]:
    """Make a function of numbers, whose body is one return statement, return a Figure of that label."""

    def decorate(function: Callable[P, Number]) -> Callable[P, Figure]:
        names = tuple(inspect.signature(function).parameters)

        @functools.wraps(function)
        def figure(*args: P.args, **kwargs: P.kwargs) -> Figure:
            inputs: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
            return Figure(label, function(*args, **kwargs), unit, inputs, function, trust)

        return figure

    return decorate


def total(label: str, unit: Unit, parts: Iterable[Figure]) -> Figure:
    """Return the sum of the parts, whose labels name the inputs."""
    figures = list(parts)
    inputs = {_name(part.label): part.value for part in figures}
    assert len(inputs) == len(figures), [part.label for part in figures]
    return Figure(label, sum(inputs.values()), unit, inputs, None)


def product(label: str, unit: Unit, trust: Trust = "estimate", **factors: Number) -> Figure:
    """Return the product of the factors, or the one number that is given; 0 without any."""
    return Figure(label, math.prod(factors.values()) if factors else 0, unit, factors, None, trust, operator=" * ")


@functools.cache
def _name(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label.lower())


@functools.cache
def _expression(function: Callable[..., Number]) -> str:
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    statement = definition.body[-1]
    assert isinstance(statement, ast.Return) and statement.value is not None
    return ast.unparse(statement.value)
