"""Metrics and findings of samples without a reward, and of responses that are rewarded but wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_mega.rewards.scorer import failures_of
from grpo_mega.tracking.metrics import has_full_marks, heldout_metrics, rollout_metrics
from grpo_mega.tracking.rules import find_warnings
from grpo_mega.types import Context, Group, Prompt, Sample

PROMPT = Prompt(0, "p", (1,), "7")


def sample(reward: float | None, verdicts: dict[str, str], scores: dict[str, float | None] | None = None) -> Sample:
    found = scores if scores is not None else dict.fromkeys(verdicts, reward)
    return Sample(PROMPT, 0, [1], [-1.0], "stop", reward=reward, scores=found, verdicts=verdicts)


def metrics_of(*samples: Sample) -> dict[str, float]:
    return rollout_metrics([Group(PROMPT, list(samples))], lambda group: False)


def test_samples_without_a_reward_are_counted() -> None:
    judged, missing = sample(1.0, {"f": "scored"}), sample(None, {"f": "error"})
    assert metrics_of(judged, missing, missing)["reward/excluded"] == 2
    assert metrics_of(judged)["reward/excluded"] == 0
    with_steps = sample(None, {"f": "scored"})
    with_steps.step_ends, with_steps.step_rewards = [0], [0.5]
    assert metrics_of(with_steps)["reward/excluded"] == 0
    assert metrics_of(judged, with_steps)["reward/steps"] == len(with_steps.step_rewards) / 2
    assert "reward/steps" not in metrics_of(judged)


def test_the_share_of_rewarded_responses_that_the_oracle_calls_wrong() -> None:
    pairs = ["correct right", "correct wrong", "correct right", "wrong wrong", "wrong right", "timeout wrong"]
    samples = [sample(0.0, {"f": pair.split()[0], "o": f"oracle_{pair.split()[1]}"}) for pair in pairs]
    assert metrics_of(*samples)["reward/paid_but_wrong"] == pytest.approx(1 / 3)
    assert metrics_of(*samples[3:])["reward/paid_but_wrong"] == 0.0
    assert "reward/paid_but_wrong" not in metrics_of(sample(1.0, {"f": "correct"}))


def test_lengths_are_of_sampled_tokens_and_agents_have_metrics() -> None:
    plain = replace(sample(1.0, {}), response_ids=[1] * 4)
    metrics = metrics_of(plain)
    assert metrics["response_length/mean"] == 4 and not any(name.startswith("agent/") for name in metrics)
    turns = {"response_ids": [1] * 12, "sampled": [(0, 3), (5, 6), (6, 8)], "messages": []}
    first = replace(plain, **turns, contexts=[Context(6, (1, 2))], finish_reason="turns")
    second = replace(plain, messages=[], finish_reason="deadline")
    metrics = metrics_of(first, second, plain)
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (14 / 3, 6)
    assert metrics["response_length/cut"] == 0
    assert {name: value for name, value in metrics.items() if name.startswith("agent/")} == {
        "agent/turns": 2.0,
        "agent/inserted_tokens": 3.0,
        "agent/segments": 1.5,
        "agent/ended_by_turns": 0.5,
        "agent/ended_by_deadline": 0.5,
    }
    assert heldout_metrics([Group(PROMPT, [first, second])])["eval/response_length"] == 5


def test_an_oracle_does_not_count_in_the_held_out_score() -> None:
    paid = sample(1.0, {"f": "correct", "o": "oracle_wrong"}, {"f": 1.0, "o": 0.0})
    assert has_full_marks(paid)
    assert heldout_metrics([Group(PROMPT, [paid])])["eval/score"] == 1.0
    assert not has_full_marks(sample(0.0, {"f": "wrong", "o": "oracle_right"}, {"f": 0.0, "o": 1.0}))


@pytest.mark.parametrize(
    ("verdict", "score", "kinds"),
    [
        ("error", None, {"missing"}),
        ("timeout", None, {"missing"}),
        ("error", 0.0, {"zero"}),
        ("timeout", 0.0, set()),
        ("not_applicable", None, set()),
        ("scored", 0.0, set()),
    ],
)
def test_a_failure_counts_as_zero_or_as_missing(verdict: str, score: float | None, kinds: set[str]) -> None:
    assert failures_of(sample(score, {"f": verdict})) == kinds


def test_the_report_names_steps_with_excluded_samples_or_a_reward_gap() -> None:
    calm = {"reward/excluded": 0.0, "reward/paid_but_wrong": 0.01}
    found = find_warnings({1: calm, 2: {"reward/excluded": 3.0, "reward/paid_but_wrong": 0.0101}}, {})
    texts = ["1.0% of the paid responses were wrong; change rewards.functions"]
    texts += ["3 samples had no reward and were excluded"]
    assert [(one.when, one.text) for one in found] == [("step 2", text) for text in texts]
    assert find_warnings({1: calm}, {}) == []
