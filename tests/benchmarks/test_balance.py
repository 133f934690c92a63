"""The benchmark of packing: other planners place every sample once, its bound holds, its last line is the headline."""

import json
import random

import pytest

from tools.benchmarks import balance as bench_balance
from tools.benchmarks.balance import (
    CASES,
    Case,
    draw_lengths,
    figures_of,
    karmarkar_karp_plan,
    largest_differences,
    least_waste,
)


def test_largest_differences_splits_the_textbook_example():
    """Karmarkar and Karp split 4, 5, 6, 7, 8 into 16 and 14. The optimum is 15 and 15."""
    parts = largest_differences([4, 5, 6, 7, 8], list(range(5)), 2, is_equal_size=False)
    assert sorted(sum([4, 5, 6, 7, 8][i] for i in part) for part in parts) == [14, 16]


def test_with_equal_sizes_all_ranks_get_equally_many_samples():
    generator = random.Random(0)
    lengths = [generator.randint(1, 1000) for _ in range(64)]
    plan = karmarkar_karp_plan(lengths, 8, 4000)
    assert [sum(map(len, rank)) for rank in plan] == [8] * 8
    assert sorted(i for rank in plan for members in rank for i in members) == list(range(64))


def test_waste_counts_padding_up_to_the_rounded_longest_micro_batch():
    found = figures_of([[[0], [1]], [[2], []]], [30, 20, 10], Case("", 0, 100), ms=0.0, cpu_ms=0.0)
    assert found.waste == pytest.approx(1 - 60 / (4 * 32)) and found.imbalance == pytest.approx(50 / 30 - 1)


def test_no_plan_wastes_less_than_the_bound():
    case = CASES[0]
    lengths = draw_lengths(case, 1024, seed=0)
    for plan in (karmarkar_karp_plan(lengths, 8, case.budget), bench_balance.plan_in_order(lengths, 8, case.budget)):
        assert figures_of(plan, lengths, case, 0.0, 0.0).waste >= least_waste(lengths, case, 8)


def test_the_last_line_is_the_headline(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_balance.py", "--samples", "1024", "--dp", "8", "--seeds", "1", "--repeat", "1"])
    assert bench_balance.main() == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert {"waste", "imbalance", "work", "work_at_32k", "ms", "cpu_ms", "bound"} <= result.keys()
    assert result["bound"] <= result["waste"] < 1e-3 and result["imbalance"] < 1e-3 and result["work"] < 2e-2
    assert len(table) == 2 + 3 * len(CASES)
