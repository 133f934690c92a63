"""The benchmark of rewards: its corpus is deterministic, and its last line is the headline."""

import json

import pytest

from tools.benchmarks import rewards as bench_rewards
from tools.benchmarks.rewards import GROUP_SIZE, build_corpus


def test_the_corpus_has_groups_of_both_kinds_with_right_and_wrong_answers() -> None:
    corpus = build_corpus(400, seed=0)
    assert corpus == build_corpus(400, seed=0) and len(corpus) == 400
    groups = [corpus[first : first + GROUP_SIZE] for first in range(0, 400, GROUP_SIZE)]
    assert all(len({(case.kind, case.gold) for case in group}) == 1 for group in groups)
    assert {case.kind for case in corpus} == {"number", "expression"}
    assert 0.2 < sum(rf"\boxed{{{case.gold}}}" in case.response for case in corpus) / 400 < 0.6


def test_the_last_line_is_the_headline(capsys: pytest.CaptureFixture[str]) -> None:
    code = bench_rewards.main(["--cases", "80", "--hangs", "2"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["verdict_changes"] == 0 and found["cases"] == 80 and 20 < found["right"] < 60
    assert all(found[name] > 0 for name in ("speedup", "speedup_numbers", "speedup_expressions", "hang_ratio"))
    assert code == (0 if found["speedup"] >= 20 and found["hang_ratio"] <= 1.2 else 1)
