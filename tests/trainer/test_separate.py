"""Runs with separate engine ranks: alternating like a colocated run, ahead of the trainer, stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.runs import losses, metrics, run, stop_after
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.waiting, pytest.mark.usefixtures("preloaded_python")]

SEPARATE = ("--set", "rollout.placement=separate", "--set", "layout.engine_ranks=1")
RECIPE = ("--set", "algorithm.recipe=partial")
AHEAD = (*SEPARATE, "--set", "rollout.max_staleness=1", *RECIPE)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rollout = {"max_response_length": 40, "stop_token_ids": [*range(3, 60, 4)]}
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    return kills.write_inputs(tmp_path_factory.mktemp("inputs"), "dp=2", rollout, **layers)


@pytest.mark.full
def test_alternating_engines_have_the_losses_of_a_colocated_run(inputs: Path, tmp_path: Path) -> None:
    settings = ("--set", "steps=4")
    code, output = run(inputs, tmp_path / "colocated", *settings)
    assert code == 0, output
    code, output = run(inputs, tmp_path / "separate", *settings, *SEPARATE, "--set", "rollout.max_staleness=0")
    assert code == 0, output
    assert losses(tmp_path / "separate") == pytest.approx(losses(tmp_path / "colocated"), rel=1e-5)
    assert len(losses(tmp_path / "separate")) == 4
    held_out = [
        [row["eval/score"] for row in metrics(tmp_path / name) if "eval/score" in row]
        for name in ("separate", "colocated")
    ]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 2


def test_a_run_one_step_ahead_keeps_staleness_and_ledger_when_resumed(inputs: Path, tmp_path: Path) -> None:
    settings = (*AHEAD, "--set", "steps=12", "--set", "batch.mini_batches=1")
    output = stop_after(inputs, tmp_path / "run", 3, *settings)
    assert "stopped after step" in output
    stop_after(inputs, tmp_path / "run", 7, *settings, "--resume")
    last = metrics(tmp_path / "run")[-1]["step"]
    code, output = run(
        inputs, tmp_path / "run", "--set", "steps=12", "--set", "batch.mini_batches=1", *RECIPE, "--resume"
    )
    assert code == 0, output
    assert "from here on rollout.placement='colocated'; it was 'separate'" in output
    assert len(losses(tmp_path / "run")) == 12 and last < 12
    rows = [row for row in metrics(tmp_path / "run") if "ledger/begun_tokens" in row]
    assert [row["ledger/trained_groups"] for row in rows] == [4.0 * n for n in range(1, last + 1)]
    for row in rows:
        assert kills.closes(row)
        assert row["staleness/max"] <= 1
        assert row["ledger/begun_groups"] - row["ledger/trained_groups"] <= 4  # at most one step of groups ahead
    assert max(row["staleness/mean"] for row in rows) > 0.5
