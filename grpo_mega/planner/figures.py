"""Figures: numbers that carry the formula they come from.

A figure's value is its formula evaluated with its inputs, so that what `--explain` and the JSON show is what was computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

Number = int | float
Unit = Literal["B", "s", "tokens", "FLOP", ""]  # "": a plain number
Trust = Literal["exact", "estimate", "unproven"]  # unproven: by a formula that no run has been compared with

GIB = 2**30
_FUNCTIONS = {"__builtins__": {}, "ceil": math.ceil, "floor": math.floor, "min": min, "max": max, "round": round}


@dataclass(frozen=True)
class Figure:
    label: str
    value: Number
    unit: Unit
    formula: str  # Python, over `inputs`; evaluates to `value`
    inputs: Mapping[str, Number]
    trust: Trust = "estimate"

    @property
    def gib(self) -> float:
        return self.value / GIB

    def as_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "value": self.value,
            "unit": self.unit,
            "formula": self.formula,
            "inputs": dict(self.inputs),
            "trust": self.trust,
        }


def figure(
    label: str,
    unit: Unit,
    formula: str,
    shared: Mapping[str, Number | Figure] | None = None,
    *,
    trust: Trust = "estimate",
    **inputs: Number | Figure,
) -> Figure:
    """`formula` evaluated with `inputs` and `shared` ones, by their names; figures stand for their values."""
    named = {**inputs, **(shared or {})}
    values = {name: given.value if isinstance(given, Figure) else given for name, given in named.items()}
    return Figure(label, evaluate(formula, values), unit, formula, values, trust)


def total(label: str, unit: Unit, parts: Iterable[Figure]) -> Figure:
    """Their sum. Inputs are named by the parts' labels."""
    named: dict[str, Number] = {}
    for part in parts:
        assert _name(part.label) not in named, part.label
        named[_name(part.label)] = part.value
    return Figure(label, sum(named.values()), unit, " + ".join(named) or "0", named)


def evaluate(formula: str, inputs: Mapping[str, Number]) -> Number:
    return eval(_compiled(formula), _FUNCTIONS, dict(inputs))  # formulas are this package's own


@functools.cache
def _name(label: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in label.lower())


@functools.cache
def _compiled(formula: str) -> CodeType:
    return compile(formula, "<formula>", "eval")
