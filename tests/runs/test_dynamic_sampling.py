"""Dynamic sampling in a real run: groups without spread are replaced, and a resumed run draws the same prompts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import bench_kills
import pytest
from bench_kills import End, read_end

pytestmark = pytest.mark.distributed

OPTIONS = [
    part
    for setting in (
        "algorithm.recipe=dapo",
        "algorithm.dynamic_sampling_tries=2",
        "steps=6",
        "batch.mini_batches=1",
        "rewards.functions=[{name: tests.helpers.coarse_reward.right_for_a_third}]",
    )
    for part in ("--set", setting)
]


def run(config: Path, run_dir: Path, *arguments: str) -> None:
    process = bench_kills.start(config, run_dir, [*OPTIONS, *arguments], output=subprocess.PIPE)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output


def metrics(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "rollouts" in row]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench_kills.write_inputs(tmp_path_factory.mktemp("dynamic"), "tp=1")


@pytest.fixture(scope="module")
def whole(config: Path) -> Path:
    run(config, config.parent / "whole")
    return config.parent / "whole"


def test_groups_whose_rewards_are_all_equal_are_replaced_up_to_the_bound(whole: Path) -> None:
    rows = metrics(whole)
    assert len(rows) == 6
    assert all(row.get("groups/no_spread", 0.0) == 0 and row["rollouts"] <= 3 for row in rows)
    assert sum(row["prompts_dropped/equal_rewards"] for row in rows) > 0
    for row in rows:  # another rollout only where the one before left too few
        assert row["rollouts"] == 1 or row["prompts_dropped/equal_rewards"] > 0
        assert row["prompts_dropped/surplus"] < 4


def test_a_stopped_run_goes_on_with_the_prompts_that_it_would_have_drawn(config: Path, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = bench_kills.start(config, run_dir, OPTIONS, output=subprocess.PIPE)
    while not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < 2:
        assert process.poll() is None
    (run_dir / "stop").touch()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and not (run_dir / "hf").exists(), output
    run(config, run_dir, "--resume")
    ends: list[End] = [read_end(run_dir), read_end(whole)]
    assert ends[0] == ends[1]
