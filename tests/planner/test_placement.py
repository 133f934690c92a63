"""Plans of jobs with generation-only ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_mega import cli
from grpo_mega.cli.commands.options import PlanOptions
from grpo_mega.cli.commands.plan import prepare_plan
from grpo_mega.cli.planner.memory import communicators
from grpo_mega.cli.planner.plan import Plan, suggest
from grpo_mega.errors import ConfigError

CONFIG: dict[str, Any] = {
    "run_dir": "runs/70b",
    "steps": 100,
    "model": {"path": "models/elsewhere", "dtype": "bfloat16", "recompute": "selective"},
    "layout": {"tp": 4, "pp": 4, "dp": 4, "sequence_parallel": True},
    "data": {"train": "data/elsewhere.jsonl", "max_prompt_length": 1024},
    "rollout": {"engine": "sglang", "tp": 8, "max_response_length": 3072},
    "algorithm": {"group_size": 32, "kl_beta": 0.01},
    "batch": {"prompts_per_step": 64, "mini_batches": 4, "tokens_per_micro_batch": 8192},
}
SEPARATE = ("rollout.placement=separate", "layout.engine_ranks=16", "layout.dp=3", "rollout.max_staleness=1")
GIB = 2**30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    return path


def plan_of(path: Path, *overrides: str, **request: Any) -> Plan:
    setup, findings = prepare_plan(PlanOptions(path, overrides=overrides, model="llama-3-70b", **request))
    assert setup is not None and not findings.violations
    return Plan(setup)


def command(path: Path, *overrides: str, options: tuple[str, ...] = ()) -> int:
    settings = [part for override in overrides for part in ("--set", override)]
    return cli.main(["plan", str(path), "--model", "llama-3-70b", *settings, *options])


def test_a_sync_between_two_sides_moves_each_engine_ranks_whole_share(path: Path) -> None:
    plan = plan_of(path, *SEPARATE)
    traffic = plan.sync_traffic
    parameters, norms = 70_553_706_496, (2 * 80 + 1) * 8192
    share = 2 * ((parameters - norms) // 8 + norms)  # bf16; every engine rank has all norms
    assert traffic.received == (0,) * 48 + (share,) * 16
    assert traffic.sent[48:] == (0,) * 16 and sum(traffic.sent) == 16 * share
    assert traffic.same_rank == 0 and traffic.same_node == 0  # the engines' nodes have no trainers
    sync = {figure.label: figure for figure in plan.timing.phases}["sync"]
    assert sync == pytest.approx(share / (0.75 * 50e9))  # over the network
    more = plan_of(path, "rollout.placement=separate", "layout.engine_ranks=96", "layout.dp=3")
    assert more.timing.phases[4] == pytest.approx(2 * sync)  # two devices receive each sent share


def test_a_trainers_device_has_nothing_of_an_engine(path: Path) -> None:
    together = plan_of(path, "rollout.sleep=never", "rollout.memory_fraction=0.4")
    apart = plan_of(path, *SEPARATE, "layout.dp=4", "rollout.memory_fraction=0.4")
    assert {"world", "trainers"} <= set(communicators(apart.setup))
    engine = together.engine
    for before, after in zip(together.stages, apart.stages, strict=True):
        for phase in ("log-probs", "update", "checkpoint"):
            # Context, graphs, workspaces and three buckets leave with the engine. The trainers' communicator replaces
            # its communicator.
            left = (0.55 + 1.5 + 0.5 + 3 * 0.25) * GIB + engine.weights + engine.cache
            assert before.totals[phase] - after.totals[phase] == pytest.approx(left)
        assert "engine weights" not in {figure.label for figure in after.phases["sync"]}
    parts = 2 * 0.55 + 3 * 0.25 + 3 * 0.25 + 2.0 + engine.weights.gib + engine.cache.gib + engine.extra.gib
    assert apart.engine_total.gib == pytest.approx(parts)
    assert together.engine_device == [] and together.engine_total == 0


def test_an_engine_that_does_not_fit_on_its_device_is_reported(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_of(path, *SEPARATE, "rollout.memory_fraction=0.9").fits
    assert command(path, *SEPARATE, "rollout.memory_fraction=0.99") == 1
    assert "DOES NOT FIT: an engine's own device takes 8" in capsys.readouterr().out


def test_separate_plans_offload_nothing_and_engine_nodes_score_rewards(path: Path) -> None:
    plan = plan_of(path, *SEPARATE, "rollout.sleep=always", "algorithm.kl_beta=0")
    assert plan.host.pinned_total == 0 and not plan.both_fit
    assert {figure.label: figure for figure in plan.host.other} == {
        "ranks": 8 * 4 * GIB,
        "engines": 0,
        "reward workers": 0,
    }
    crowded = plan_of(path, *SEPARATE, "rewards.num_workers=3000", "rollout.tp=4").host  # two engines per node
    assert {figure.label: figure for figure in crowded.other} == {
        "ranks": 8 * 4 * GIB,
        "engines": 8 * 5 * GIB,
        "reward workers": pytest.approx(2 * 3000 * 0.4 * GIB),
    }
    assert crowded.saving == 0


def test_a_step_ahead_hides_waiting(path: Path) -> None:
    def waits(*overrides: str) -> tuple[float, float]:
        times = {figure.label: figure for figure in plan_of(path, *SEPARATE, *overrides).timing.phases}
        return times["sampling"], times["log-probs"] + times["update"]

    (in_turns, training), (ahead, _) = waits("rollout.max_staleness=0"), waits()
    assert training > 30 and 0 < ahead < in_turns - training
    assert waits("layout.engine_ranks=96")[0] == 0 < waits("layout.engine_ranks=96", "rollout.max_staleness=0")[0]


def test_partial_rollouts_wait_for_no_longest_response(path: Path) -> None:
    partial = plan_of(path, "rollout.partial=true", "rollout.oversample=2").timing.phases[0]
    assert 0 < partial < plan_of(path).timing.phases[0]


def test_a_plan_with_engine_ranks_reads_well(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(path, *SEPARATE, "algorithm.recipe=partial") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 100 or line != line.rstrip()] == []
    text = "\n".join(lines)
    assert "on separate ranks, 48-63; the others train" in text
    assert (
        "tp=4, pp=4, vpp=1, cp=1, dp=3, ep=1, sequence parallel" in text
        and "64 x H100" in text
        and "2 of tp=8, each within a node; the first: ranks 48-55" in text
    )
    assert "Memory, engine's own device (" in text and "sampling is the time that the trainers wait" in text


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("layout.engine_ranks=16",), "layout.engine_ranks=16 needs rollout.placement=separate"),
        ((*SEPARATE, "rollout.partial=true", "rollout.oversample=1.5"), "conflicts with rollout.placement=separate"),
    ],
    ids=["ranks without placement", "partial"],
)
def test_keys_that_contradict_one_another_are_refused(path: Path, overrides: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        plan_of(path, *overrides)


def test_ranks_that_the_layout_does_not_fill_are_violations(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(path, "rollout.placement=separate", "layout.engine_ranks=12") == 2
    assert "rollout.tp=8 does not divide the job's 12 engine ranks; use one of 1, 2, 3" in capsys.readouterr().out
    assert command(path, *SEPARATE, options=("--world-size", "48")) == 2
    assert "WORLD_SIZE=48 contradicts layout.tp=4, pp=4, dp=3, engine_ranks=16" in capsys.readouterr().out
    assert command(path, *SEPARATE, "layout.tp=2", "layout.pp=2", "layout.dp=3", options=("--json",)) == 2
    problems = json.loads(capsys.readouterr().out)["violations"]
    assert any(
        "an engine of 8 ranks would span two nodes of 8 ranks, since it comes after 12" in problem
        for problem in problems
    )


def test_suggestions_keep_the_engine_ranks(path: Path) -> None:
    setup = plan_of(path, *SEPARATE, "rollout.max_staleness=0").setup
    options = suggest(setup)
    assert len(options) == 5
    for option in options:
        layout = option.plan.setup.layout
        assert option.plan.setup.config.layout.engine_ranks == 16 and option.plan.setup.world_size == 64
        assert layout.tp * layout.pp * layout.dp == 48
