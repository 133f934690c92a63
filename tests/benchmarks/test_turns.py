"""The benchmark of turns at a tiny size, compared with this checkout itself."""

from __future__ import annotations

import json

import pytest

from grpo_mega.rollout.embedded import engine as turn_loop
from tools.benchmarks import harness
from tools.benchmarks.turns import __main__ as benchmark


@pytest.mark.full
def test_all_variants_run_and_the_same_checkout_gives_the_same_responses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"num_hidden_layers": 2, "hidden_size": 40, "intermediate_size": 72, "head_dim": 8, "vocab_size": 307}
    monkeypatch.setattr(benchmark, "MODEL", benchmark.MODEL | tiny)
    sizes = ["--prompts=3", "--samples=2", "--prompt=5", "--length=6", "--concurrent=4", "--repeat=1"]
    join_every = turn_loop.JOIN_EVERY
    benchmark.main([f"--against={harness.ROOT}", *sizes])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["is_same"] is True and found["tokens"] > 10 and join_every == turn_loop.JOIN_EVERY
    assert found["joining"] > 0 and found["single"] > 0
    assert found["seconds"].keys() == {"joining", "rounds", "single", "other"}


def test_another_checkout_must_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["--against=/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("--against=/nowhere: must be a checkout")
