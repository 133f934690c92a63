"""Plans with context parallelism: saved activations at 32k tokens against real Megatron, rank order, times, and
advice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_mega.cli.checks.model import KNOWN_MODELS
from grpo_mega.cli.commands.options import PlanOptions
from grpo_mega.cli.commands.plan import prepare_plan
from grpo_mega.cli.planner.activations import activations
from grpo_mega.cli.planner.memory import communicators
from grpo_mega.cli.planner.plan import Plan, first_changes, suggest
from grpo_mega.cli.planner.report import rank_groups

pytestmark = pytest.mark.pool

ROOT = Path(__file__).resolve().parents[2]
LONG_70B, LONG_8B = "slurm/llama3_70b_32k.yaml", "examples/qwen3-8b-32k.yaml"


def plan_of(config: str, *overrides: str, model: str | None = None) -> Plan:
    setup, violations = prepare_plan(
        PlanOptions(ROOT / config, overrides=overrides, model=model, gpu="h100", gpus_per_node=8)
    )
    assert setup is not None and not violations.violations, violations.violations
    return Plan(setup)


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, int], float]:
    """Return the peak bytes that autograd saves for a sample of 32,768 tokens, by recompute and ranks, for 4 layers of
    an 8B."""
    from tests.helpers.rehearsal import rehearse  # imports Megatron

    fields = dict(KNOWN_MODELS["qwen3-8b"].fields) | {"num_hidden_layers": 4}
    cases = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.helpers.rehearsal.SEGMENTS", 1)
        for recompute in ("none", "selective", "full"):
            for cp in (1, 2):
                layout = {"tp": 1, "sequence_parallel": "false", "cp": cp, "dp": 1}
                overrides = [f"layout.{name}={size}" for name, size in layout.items()]
                overrides += [
                    f"model.recompute={recompute}",
                    f"batch.tokens_per_micro_batch={32768 // cp}",
                    "rollout.tp=1",
                ]
                setup = plan_of(LONG_8B, *overrides).setup
                cases[recompute, cp] = replace(setup, shape=replace(setup.shape, num_layers=4)), [cp - 1], fields
        rehearsed = rehearse([*cases.values()])
    found = [[c.rehearsed for c in comparisons if c.label == "activations kept"] for comparisons in rehearsed]
    return {case: size for case, [size] in zip(cases, found, strict=True)}


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_each_of_two_ranks_keeps_half_of_the_activations_of_32k_tokens(
    kept: dict[tuple[str, int], float], recompute: str
) -> None:
    assert kept[recompute, 2] == pytest.approx(kept[recompute, 1] / 2, rel=0.05)
    assert kept["none", 1] > 1.4 * kept["selective", 1] > 2 * kept["full", 1] > 2**31


@pytest.mark.parametrize("config", [pytest.param(LONG_70B, marks=pytest.mark.full), LONG_8B])
def test_context_parallelism_is_advised_first_for_long_samples(config: str) -> None:
    plan = plan_of(config, "layout.cp=1", "layout.dp=4", "batch.tokens_per_micro_batch=32768")
    assert plan.is_tight or "most of it activations saved" in plan.shortfalls[0]
    advised = first_changes(plan)[0]
    sizes = advised.changes
    assert sizes["layout.cp"] * sizes["layout.dp"] == 4
    assert sizes["layout.cp"] * sizes["batch.tokens_per_micro_batch"] == 32768
    again = plan_of(config, *advised.flags.replace("--set ", "").split())
    assert again.fits and again.peak_gib == advised.plan.peak_gib
    assert any(option.plan.setup.layout.cp > 1 for option in suggest(plan.setup))


def test_context_parallelism_is_not_advised_if_fewer_samples_suffice() -> None:
    plan = plan_of("slurm/llama3_70b_bf16.yaml", "batch.tokens_per_micro_batch=32768", "model.recompute=selective")
    assert not plan.fits and "most of it activations saved" in plan.shortfalls[0]
    assert first_changes(plan)
    assert all(option.plan.setup.layout.cp == 1 for option in [*first_changes(plan), *suggest(plan.setup)])


def test_context_parallel_ranks_follow_tensor_parallel_ranks() -> None:
    layout = plan_of(LONG_70B).setup.layout
    assert rank_groups(layout, "tp")[0] == [0, 1, 2, 3] and rank_groups(layout, "cp")[1] == [1, 5, 9, 13]
    assert rank_groups(layout, "pp")[0] == [0, 16, 32, 48] and rank_groups(layout, "dp") == rank_groups(layout, "cp")
    for tp, cp, dp in ((2, 4, 2), (4, 4, 1), (1, 8, 2)):
        sizes = [
            f"layout.tp={tp}",
            f"layout.cp={cp}",
            f"layout.dp={dp}",
            f"layout.sequence_parallel={str(tp > 1).lower()}",
        ]
        plan = plan_of(LONG_70B, *sizes)
        assert {"context parallel", "data parallel"} <= set(communicators(plan.setup))


def test_context_parallel_ranks_share_work_and_state_like_data_parallel() -> None:
    apart, shared = (
        plan_of(LONG_8B, "layout.cp=1", "layout.dp=4", "batch.tokens_per_micro_batch=32768"),
        plan_of(LONG_8B),
    )
    assert apart.setup.batch.tokens == shared.setup.batch.tokens
    # Each micro-batch is half as long.
    assert shared.setup.batch.micro_batches == pytest.approx(2 * apart.setup.batch.micro_batches, abs=1)
    assert shared.setup.batch.most_micro_batches == 2 * apart.setup.batch.most_micro_batches
    assert [stage.state for stage in apart.stages] == [stage.state for stage in shared.stages]
    seconds = [{phase.label: phase for phase in plan.timing.phases} for plan in (apart, shared)]
    assert seconds[0]["update"] == seconds[1]["update"]


def test_exchanged_keys_and_values_do_not_depend_on_a_ranks_tokens() -> None:
    """Attention over cp ranks holds keys and values of cp times a rank's tokens, so their size depends only on the
    samples.
    """
    setup = plan_of(LONG_70B).setup
    sizes = []
    for cp, tokens in ((2, 16384), (4, 8192)):
        layout = setup.config.layout.model_copy(update={"cp": cp, "dp": 4 // cp})
        batch = setup.config.batch.model_copy(update={"tokens_per_micro_batch": tokens})
        changed = replace(
            setup, config=setup.config.model_copy(update={"layout": layout, "batch": batch}), uses_te=False
        )
        sizes.append(activations(changed, 0).exchanged)
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)
