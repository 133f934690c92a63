"""One check is shared by all samples that depend on it: timeouts, crashes, gold answers that hang, and `len` and
`cosine`.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mega.config.data import RewardsConfig
from grpo_mega.rewards import RewardPool, RewardResult
from grpo_mega.rewards import pool as pool_module
from tests.helpers.reward_pools import reward_pool
from tests.helpers.slow_job import SlowJob

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

LONG = "+".join(["y"] * 200)  # an answer too long for the exact path, so a worker checks it
ALL = [("accuracy", 1.0), ("len", 1.0), ("cosine", 1.0)]


@pytest.fixture(autouse=True)
def _accuracy_obeys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pool_module, "CheckJob", SlowJob)
    yield


def scored(pool: RewardPool, responses: list[str], **extras: str) -> list[RewardResult]:
    """Score the responses as one group."""
    for key, response in enumerate(responses):
        pool.submit(key, "p", response, "x+1", extras)
    pool.submit_group(range(len(responses)), {}, [[1]] * len(responses))
    return list(pool.collect().values())


@pytest.mark.parametrize("answer", ["x+SLOW", pytest.param(f"SLOW+{LONG}", marks=pytest.mark.full)])
def test_sixteen_equal_bombs_cost_one_deadline(answer: str) -> None:
    with reward_pool(ALL, num_workers=2, deadline_s=2) as pool:
        responses = [rf"{number} {'so ' * number}\boxed{{{answer}}}" for number in range(16)]
        results = scored(pool, responses)
        assert [result.verdicts for result in results] == [dict.fromkeys(("accuracy", "len", "cosine"), "timeout")] * 16
        assert {result.scores["accuracy"] for result in results} == {0.0}
        assert all(result.scores["len"] <= 0 and -1 <= result.scores["cosine"] < -0.5 for result in results)  # type: ignore[operator]
        assert pool.counters["killed_workers"] == 1
        scored(pool, responses[:2])
        assert pool.counters["killed_workers"] == 2, "the next rollout tries again"


def test_equal_answers_that_kill_their_worker_are_tried_twice_in_total() -> None:
    with reward_pool([("accuracy", 1.0)], num_workers=2) as pool:
        results = scored(pool, [r"\boxed{x+DEADLY}"] * 16 + [r"\boxed{1+x}"])
        assert [result.total for result in results] == [0.0] * 16 + [1.0]
        assert {result.verdicts["accuracy"] for result in results[:16]} == {"error"}
        assert pool.counters["retried"] == 1 and pool.first_error and "SIGKILL" in pool.first_error


@pytest.mark.parametrize("gold", [pytest.param("x+SLOW", marks=pytest.mark.full), f"SLOW+{LONG}", "x+DEADLY"])
def test_a_gold_answer_that_cannot_be_checked_is_unparsable_for_all(gold: str) -> None:
    with reward_pool(ALL, num_workers=1, deadline_s=2) as pool:
        pool.submit("right", "p", r"\boxed{1+x}", "x+1", {})
        for key in range(5):
            pool.submit(key, "p", rf"\boxed{{x+{key}+{gold}}}", gold, {})  # each of these answers hangs or dies, too
        pool.submit_group(range(5), {}, [[1]] * 5)
        results = pool.collect()
        assert results.pop("right").scores["accuracy"] == 1.0
        assert {(result.total, *result.verdicts.values()) for result in results.values()} == {
            (None, *["gold_unparsable"] * 3)
        }
        assert pool.counters["killed_workers"] == (0 if "DEADLY" in gold else 2), "one answer, then the gold answer"


@pytest.mark.full
def test_a_bomb_is_not_blamed_on_a_gold_answer_that_can_be_checked() -> None:
    with reward_pool([("accuracy", 1.0)], num_workers=1, deadline_s=2) as pool:
        results = scored(pool, [r"\boxed{x+SLOW}", r"\boxed{1+x}", r"\boxed{x+2+SLOW}"])
        assert [result.verdicts["accuracy"] for result in results] == ["timeout", "correct", "timeout"]
        assert pool.counters["killed_workers"] == 2


@pytest.mark.parametrize("names", [("accuracy", "len", "cosine"), ("len",), ("cosine", "len")])
def test_accuracy_len_and_cosine_share_one_check_per_answer(names: tuple[str, ...], tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with reward_pool([(name, 1.0) for name in names], num_workers=2) as pool:
        responses = [rf"{'so ' * number}\boxed{{{'1+x' if number % 2 else 'x+2'}}}" for number in range(7)]
        results = scored(pool, responses, calls=str(calls))
    assert calls.read_text().splitlines() == ["call"] * 2
    lengths = [len(response) for response in responses]
    for number, (result, length) in enumerate(zip(results, lengths, strict=True)):
        is_right = number % 2 == 1
        position = 0.5 - (length - min(lengths)) / (max(lengths) - min(lengths))
        wave = (1 + math.cos(math.pi * length / 1000)) / 2
        expected = {
            "accuracy": float(is_right),
            "len": position if is_right else min(0.0, position),
            "cosine": 0.5 + 0.5 * wave if is_right else -0.5 - 0.5 * wave,
        }
        assert result.scores == pytest.approx({name: expected[name] for name in names})
        assert set(result.verdicts.values()) == {"correct" if is_right else "wrong"}


def test_cosine_gets_its_options_and_a_sample_without_a_group_is_a_group() -> None:
    with reward_pool(
        [("cosine", 1.0), ("len", 0.0)], options={"cosine": {"max_value_correct": 7.0, "max_len": 1e9}}
    ) as pool:
        pool.submit("alone", "p", r"\boxed{1+x}", "x+1", {})
        result = pool.collect()["alone"]
    assert result.scores == pytest.approx({"cosine": 7.0, "len": 0.0})


def test_a_group_with_a_discarded_sample_is_scored_without_it() -> None:
    with reward_pool([("len", 1.0)], num_workers=1, deadline_s=2) as pool:
        for key, text in enumerate([r"\boxed{x+SLOW}", r"\boxed{1+x}", r"so \boxed{1+x}"]):
            pool.submit(key, "p", text, "x+1", {})
        pool.submit_group(range(3), {}, [[1]] * 3)
        pool.discard([0])
        assert [result.total for result in pool.collect().values()] == [0.5, -0.5]


def test_workers_can_unpickle_the_job_of_these_tests() -> None:
    assert isinstance(pickle.loads(pickle.dumps(SlowJob(None, RewardsConfig(), False))), SlowJob)
