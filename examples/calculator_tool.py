"""The tool of examples/calculator.yaml. Workers import this file for each call, so it imports little."""

from __future__ import annotations


def calculate(expression: str) -> int:
    """Multiply two whole numbers.

    Args:
        expression: The product to calculate, such as 34*27.
    """
    first, second = map(int, expression.split("*"))
    return first * second
