"""The benchmark of packing: its figures equal a count by hand, its bound holds, its last line is the headline."""

import json

import pytest

from tools.benchmarks import balance as bench_balance
from tools.benchmarks.balance import CASES, Case, draw_lengths, figures_of


def test_waste_counts_padding_up_to_the_rounded_longest_micro_batch():
    found = figures_of([[[0], [1]], [[2], []]], [30, 20, 10], Case("", 0, 100))
    assert found["waste"] == pytest.approx(1 - 60 / (4 * 32)) and found["imbalance"] == pytest.approx(50 / 30 - 1)


def test_no_plan_wastes_less_than_the_bound():
    case = CASES[0]
    lengths = draw_lengths(case, 1024, seed=0)
    one_by_one = [[[i] for i in range(rank, 1024, 8)] for rank in range(8)]
    assert figures_of(one_by_one, lengths, case)["waste"] > figures_of(one_by_one, lengths, case)["bound"]
    found = bench_balance.measure(case, [lengths], 8, repeat=1)
    assert found["bound"] <= found["waste"] < 1e-3


def test_the_last_line_is_the_headline(capsys):
    assert bench_balance.main(["--samples", "1024", "--dp", "8", "--seeds", "1", "--repeat", "1"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert {"waste", "imbalance", "work", "work_at_32k", "ms", "cpu_ms", "bound"} <= result.keys()
    assert result["bound"] <= result["waste"] < 1e-3 and result["imbalance"] < 1e-3 and result["work"] < 2e-2
    assert len(table) == 2 + len(CASES)


def test_a_figure_above_its_limit_is_named_and_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setitem(bench_balance.LIMITS, "waste", 0.0)
    assert bench_balance.main(["--samples", "64", "--dp", "2", "--seeds", "1", "--repeat", "1"]) == 1
    assert "above its limit of 0" in capsys.readouterr().out


def test_fewer_samples_than_ranks_are_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        bench_balance.main(["--samples", "3"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "--samples=3 must be at least --dp=64; see --help\n"
