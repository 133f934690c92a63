"""Rules on a run's metrics: each fires on recorded metrics, with figures and keys, at most once in 20 steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mega import config
from grpo_mega.cli.report.writer import ReportWriter
from grpo_mega.tracking.curves import by_step, read_curves
from grpo_mega.tracking.rules import RULES, MetricWarning, Monitor, find_warnings
from grpo_mega.tracking.run_log import Hooks, open_run_log
from grpo_mega.tracking.writers import JsonLinesWriter
from grpo_mega.types import StepMetrics

# Metrics of a healthy step.
CALM: StepMetrics = {
    "reward/mean": 0.6,
    "reward/std": 0.49,
    "reward/excluded": 0.0,
    "response_length/mean": 400.0,
    "response_length/max": 1000.0,
    "response_length/cut": 0.02,
    "groups/zero_variance": 0.3,
    "clip/fraction": 0.01,
    "mismatch/k3": 0.001,
    "seconds/idle": 20.0,
    "engine/retracted": 0.0,
    "seconds/sample": 50.0,
    "seconds/step": 100.0,
    "verdict/accuracy/correct": 0.6,
    "dropped_mini_batches": 0.0,
    "nonfinite_mini_batches": 0.0,
    "grad_norm": 0.5,
}
RAW = {
    "run_dir": "run",
    "steps": 200,
    "model": {"path": "m"},
    "data": {"train": "d.jsonl"},
    "rollout": {"max_response_length": 1024},
}
KEYS = config.leaves(config.validate(RAW).model_dump(mode="json"))
SEPARATE = KEYS | {"rollout.placement": "separate", "layout.engine_ranks": 8, "rollout.max_staleness": 1}

# Rule -> metrics of a step that differ from CALM, and the text at the first step at which the rule fires.
CASES: dict[str, tuple[Callable[[int], StepMetrics], str]] = {
    "equal rewards": (
        lambda step: {"reward/mean": 0.0, "reward/std": 0.0, "groups/zero_variance": 1.0},
        "step 3: all rewards of a step were equal in the last 3 steps (mean 0), so nothing was learned; check"
        " rewards.functions with grpo-mega eval, or use other prompts in data.train",
    ),
    "zero variance": (
        lambda step: {"groups/zero_variance": 0.9 if step % 2 else 0.8},
        "step 5: 86% of the groups had no variance in the last 5 steps and taught nothing (mean reward 0.6); choose"
        " prompts with data.min_pass_rate and max_pass_rate, raise algorithm.group_size=16, or raise"
        " algorithm.dynamic_sampling_tries=0",
    ),
    "cut": (
        lambda step: {"response_length/cut": 0.1 * step},
        "step 5: 30% of the responses were cut at rollout.max_response_length=1024 in the last 5 steps; raise it, or"
        " make responses shorter with algorithm.overlong_buffer",
    ),
    "hacked": (
        lambda step: {"reward/mean": 0.02 * step, "response_length/cut": 0.5},
        "step 20: the reward rose from 0.11 to 0.31 in the last 20 steps while 50% of the responses were cut at"
        " rollout.max_response_length=1024; a reward that needs no answer may be hacked: read the samples, and change"
        " rewards.functions",
    ),
    "drift": (
        lambda step: {"response_length/mean": 100.0 + 10 * step},
        "step 50: the mean response length went from 130 to 580 tokens in the last 50 steps"
        " (rollout.max_response_length=1024); limit it with algorithm.overlong_buffer",
    ),
    "clip": (
        lambda step: {"clip/fraction": 0.4},
        "step 5: 40% of the tokens were clipped in the last 5 steps; lower optimizer.lr=1e-06, batch.mini_batches=1 or"
        " batch.epochs=1",
    ),
    "mismatch": (
        lambda step: {"mismatch/k3": 0.5 if step == 4 else 0.02},
        "step 4: engine and trainer differ by a KL (k3) of 0.5 nats per token, above rollout.mismatch_warn=0.02; set"
        " rollout.dtype to the trainer's dtype, or correct for it with algorithm.correction.importance",
    ),
    "staleness": (
        lambda step: {"ledger/dropped_groups/stale": 3.0 * step, "ledger/dropped_tokens/stale": 1500.0 * step},
        "step 5: 12 groups with 6,000 tokens became older than rollout.max_staleness=2 and restarted in the last 5"
        " steps; raise it, or start fewer groups with rollout.oversample=1.0",
    ),
    "cache": (
        lambda step: {"engine/retracted": 0.12},
        "step 5: the engines' KV cache was full, so 12% of the responses were interrupted and computed again in the"
        " last 5 steps; raise rollout.cache_tokens or rollout.memory_fraction, or lower rollout.max_concurrent=256",
    ),
    "idle": (
        lambda step: {"seconds/idle": 40.0},
        "step 5: the engines' slots were idle for 80% of the time of generation in the last 5 steps, which is 50% of"
        " a step, because a few responses are long (mean/longest: 400/1000 tokens); set rollout.oversample=1.25 and"
        " rollout.partial=true, or rollout.placement=separate",
    ),
    "unread": (
        lambda step: {"reward/steps": 0.125} if step > 2 else {},
        "step 3: rewards of turns and steps (chat.reward, Score.steps) do nothing with algorithm.adv_type=grpo; set"
        " algorithm.recipe=mt_grpo or process_supervision, or reward whole responses",
    ),
    "wrong": (
        lambda step: {"reward/paid_but_wrong": 0.03},
        "step 1: 3.0% of the paid responses were wrong; change rewards.functions",
    ),
    "rising": (
        lambda step: {"loss/nll": 1.05**step, "epoch": 0.0},
        "step 20: the loss rose from 1.16 to 2.41 in the last 20 steps; lower optimizer.lr=1e-06, or raise"
        " optimizer.warmup_steps=0",
    ),
    "not finite": (
        lambda step: {"kl/mean": float("nan"), "grad_norm": float("inf")} if step == 2 else {},
        "step 2: not finite: grad_norm, kl/mean; lower optimizer.lr=1e-06",
    ),
}


def recorded(folder: Path, change: Callable[[int], StepMetrics], num_steps: int = 60) -> dict[int, dict[str, float]]:
    """Write metrics.jsonl as a run does, and return its metrics by step."""
    writer = JsonLinesWriter(folder)
    for step in range(1, num_steps + 1):
        writer.write_step(step, CALM | change(step))
    writer.close()
    return by_step(read_curves(folder / "metrics.jsonl"))


def warnings_of(steps: dict[int, dict[str, float]], keys: dict[str, object] = KEYS) -> list[str]:
    monitor = Monitor(keys)
    return [text for step in steps for text in monitor.observe(step, steps[step])]


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_with_its_figures_and_keys(tmp_path: Path, rule: str) -> None:
    change, text = CASES[rule]
    steps = recorded(tmp_path, change)
    others = {"cut"} if rule == "hacked" else set()
    assert text in warnings_of(steps)
    found = {one.rule: one for one in find_warnings(steps, KEYS)}
    assert found.keys() == {rule} | others
    assert found[rule].steps[0] == int(text.split()[1].rstrip(":"))


def test_every_rule_that_warns_has_a_case_and_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    assert [rule.name for rule in RULES if not rule.is_logged_elsewhere] == list(CASES)
    steps = recorded(tmp_path, lambda step: {})
    assert len(steps) == 60 and warnings_of(steps) == [] and find_warnings(steps, KEYS) == []


@pytest.mark.parametrize("rule", [rule for rule in CASES if rule not in ("mismatch", "not finite")])
def test_a_rule_warns_at_most_once_in_20_steps(tmp_path: Path, rule: str) -> None:
    change, text = CASES[rule]
    steps = recorded(tmp_path, change, 100)
    (found,) = (one for one in find_warnings(steps, KEYS) if one.rule == rule)
    told = [int(one.split()[1].rstrip(":")) for one in warnings_of(steps) if one.endswith(text[-15:])]
    expected = found.steps[:1]
    for step in found.steps:
        expected += [step] if step >= expected[-1] + 20 else []
    assert told == expected and len(told) >= 2


@pytest.mark.parametrize(
    ("change", "is_hacked"),
    [
        (lambda step: {"reward/mean": 0.02 * step, "response_length/cut": 0.1}, False),  # the responses end
        (lambda step: {"reward/mean": 0.02 * step, "response_length/cut": 0.6 - 0.02 * step}, False),  # fewer are cut
        (lambda step: {"reward/mean": 0.5 + 0.001 * step, "response_length/cut": 0.5}, False),  # the rise is noise
        (lambda step: {"reward/mean": 1.0 - 0.02 * step, "response_length/cut": 0.5}, False),
        (lambda step: {"reward/mean": 0.1 * step, "response_length/cut": 0.5}, True),
    ],
)
def test_a_rising_reward_is_suspicious_only_while_many_are_cut(
    tmp_path: Path, change: Callable[[int], StepMetrics], is_hacked: bool
) -> None:
    found = find_warnings(recorded(tmp_path, change, 20), KEYS)
    assert ("hacked" in [one.rule for one in found]) == is_hacked


def test_other_forms_of_drift_staleness_and_idle_engines(tmp_path: Path) -> None:
    shrinking = warnings_of(recorded(tmp_path / "a", lambda step: {"response_length/mean": 600.0 - 10 * step}, 50))
    assert shrinking[0].startswith("step 50: the mean response length went from 570 to 120 tokens in the last 50 steps")
    assert shrinking[0].endswith("; read the samples, and change rewards.functions or raise algorithm.kl_beta=0.0")
    stale = {"mismatch/k3_stale_0": 0.001, "mismatch/k3_stale_2": 0.4}
    (text,) = warnings_of(recorded(tmp_path / "b", lambda step: stale, 20))
    assert text == (
        "step 5: tokens that are 2 versions old differ by a KL (k3) of 0.4 nats per token from the policy that trains"
        " on them, in the last 5 steps; lower rollout.max_staleness=2, or lower optimizer.lr=1e-06"
    )
    steps = recorded(tmp_path / "c", lambda step: {"seconds/idle": 3.5, "seconds/sample": 5.0}, 20)
    assert warnings_of(steps) == []  # generation is a small part of the step
    assert warnings_of(steps, SEPARATE)[0].endswith(
        "in the last 5 steps; lower layout.engine_ranks=8, or raise rollout.max_staleness=1"
    )


def test_the_mismatch_of_stale_tokens_is_not_that_of_the_engine(tmp_path: Path) -> None:
    fresh = {"mismatch/k3": 0.5, "mismatch/k3_stale_0": 0.001, "mismatch/k3_stale_1": 0.05}
    assert find_warnings(recorded(tmp_path, lambda step: fresh), KEYS) == []


def test_findings_that_the_run_logs_elsewhere_are_in_the_report(tmp_path: Path) -> None:
    def change(step: int) -> StepMetrics:
        if step == 3:
            return {"nonfinite_mini_batches": 2.0, "dropped_mini_batches": 2.0}
        if step in (7, 9):
            return {"verdict/accuracy/timeout": 0.1, "reward/excluded": 4.0}
        return {"dropped_mini_batches": 1.0} if step > 50 else {}

    steps = recorded(tmp_path, change)
    assert warnings_of(steps) == []
    found = find_warnings(steps, KEYS)
    assert [(one.when, one.text) for one in found] == [
        ("steps 3 to 60 (11 times)", "1 mini-batches were dropped by algorithm.early_stop_imp_ratio"),
        (
            "steps 7 to 9 (2 times)",
            "reward functions failed, share of samples: accuracy/timeout 10.0%; see rewards.deadline_s",
        ),
        ("steps 7 to 9 (2 times)", "4 samples had no reward and were excluded"),
    ]
    assert [MetricWarning("", "", steps).when for steps in ([4], [4, 5, 6])] == ["step 4", "steps 4 to 6"]


def test_a_run_warns_in_its_log_and_a_resumed_run_does_not_repeat_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config.validate(RAW | {"run_dir": str(tmp_path / "run")})
    log = open_run_log(run, 0, Hooks())
    for step in range(1, 7):
        log.log_step(step, CALM | {"clip/fraction": 0.4})
    log.close()
    assert capsys.readouterr().out.count("40% of the tokens were clipped") == 1
    log = open_run_log(run, 0, Hooks(ReportWriter))
    for step in range(7, 25):
        log.log_step(step, CALM | {"clip/fraction": 0.4})
    assert "clipped" not in capsys.readouterr().out
    log.log_step(25, CALM | {"clip/fraction": 0.4})
    log.close()
    assert "step 25: 40% of the tokens were clipped" in capsys.readouterr().out
    page = (tmp_path / "run/report.html").read_text()
    assert '"findings":[["steps 5 to 25","40% of the tokens were clipped' in page
