"""Figures: the shown formula and inputs are the ones that were computed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from grpo_mega.cli.planner import job
from grpo_mega.cli.planner.job import figure, product, total

PLANNER = Path(job.__file__).parent


def test_a_figure_shows_the_source_and_the_variables_of_its_lambda() -> None:
    tokens, rate, unused = 12, 4.0, 7
    found = figure("time", lambda: tokens / (2 * rate), "s", "exact")
    tokens = unused  # a change after the computation has no effect
    assert (found.value, found.formula, found.inputs) == (1.5, "tokens / (2 * rate)", {"rate": 4.0, "tokens": 12})
    assert (found.at(tokens=24), found.at()) == (3.0, 1.5)
    assert found.as_json()["trust"] == "exact"


def test_sums_and_products_show_their_parts() -> None:
    parts = [product("engine weights", elements=6, b=2), product("KV cache", tokens=3)]
    whole = total("all", parts)
    assert (whole.value, whole.formula) == (15, "engine_weights + kv_cache")
    assert (parts[0].formula, product("nothing").value) == ("elements * b", 0)


def test_a_formula_over_figures_shows_their_exact_numbers() -> None:
    """A figure computes as a float, which has too few bits for large integers; a formula gets the integer itself."""
    large = product("large", bytes=2**53 + 1)
    more = figure("more", lambda: large + 2)
    assert (more.value, more.inputs, product("same", large=large).value) == (2**53 + 3, {"large": 2**53 + 1}, 2**53 + 1)
    assert type(more.inputs["large"]) is int and total("sum", [large]).value == large.value
    assert (large / 2**53, max(large, product("small", bytes=1)).label) == (1.0, "large")


@pytest.mark.parametrize("path", sorted(PLANNER.glob("*.py")), ids=lambda path: path.name)
def test_no_line_holds_two_lambdas(path: Path) -> None:
    """A figure finds its source by the first line of its lambda."""
    lines = [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Lambda)]
    assert len(lines) == len(set(lines))
