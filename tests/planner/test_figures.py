"""Figures: the shown formula and inputs are the ones that were computed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from grpo_mega.planner import figures
from grpo_mega.planner.figures import figure, product, total

PLANNER = Path(figures.__file__).parent


def test_a_figure_shows_the_source_and_the_variables_of_its_lambda() -> None:
    tokens, rate, unused = 12, 4.0, 7
    found = figure("time", "s", lambda: tokens / (2 * rate), "exact")
    tokens = unused  # a change after the computation has no effect
    assert (found.value, found.formula, found.inputs) == (1.5, "tokens / (2 * rate)", {"rate": 4.0, "tokens": 12})
    assert (found.at(tokens=24), found.at()) == (3.0, 1.5)
    assert found.as_json()["trust"] == "exact"


def test_sums_and_products_show_their_parts() -> None:
    parts = [product("engine weights", "B", elements=6, b=2), product("KV cache", "B", tokens=3)]
    whole = total("all", "B", parts)
    assert (whole.value, whole.formula) == (15, "engine_weights + kv_cache")
    assert (parts[0].formula, product("nothing", "B").value) == ("elements * b", 0)


@pytest.mark.parametrize("path", sorted(PLANNER.glob("*.py")), ids=lambda path: path.name)
def test_no_line_holds_two_lambdas(path: Path) -> None:
    """A figure finds its source by the first line of its lambda."""
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Lambda)]
    assert len(lines) == len(set(lines))
