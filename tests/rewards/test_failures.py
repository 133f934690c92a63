"""A reward function ends the run only if the data can hardly be the cause. A server's fault is a missing score."""

import os
import signal

import pytest

from grpo_mega.errors import RewardError
from grpo_mega.rewards.api import RewardResult
from grpo_mega.rewards.scorer import Failures
from grpo_mega.types import Prompt, Sample
from tests.helpers.http_servers import serving
from tests.helpers.reward_pools import reward_pool

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

Scored = tuple[Sample, RewardResult]


def scored(prompt: int, response: int, raises: bool = True) -> Scored:
    sample = Sample(Prompt(prompt, f"p{prompt}", (1,), "7"), response, [response], [-1.0], "stop")
    verdicts = {"good": "scored", "bad": "error" if raises else "scored"}
    return sample, RewardResult(
        1.0, {"good": 1.0, "bad": 0.0}, verdicts, errors={"bad": "KeyError: 'x'"} if raises else {}
    )


def test_one_sample_or_one_row_of_data_never_ends_a_run() -> None:
    failures = Failures()
    failures.add([scored(0, 0)])
    for step in range(10):
        failures.add([scored(0, 16 * step + i) for i in range(16)])
        failures.add([])


def test_the_same_samples_again_do_not_count() -> None:
    failures = Failures()
    for _ in range(10):
        failures.add([scored(prompt, 5) for prompt in range(7)])


def test_many_failed_samples_of_several_prompts_end_the_run() -> None:
    text = r"'bad' raised an exception for every one of the last 8 samples, now KeyError: 'x'; correct the function"
    with pytest.raises(RewardError, match=text):
        Failures().add([scored(i % 4, i) for i in range(8)])
    failures = Failures()
    for i in range(7):
        failures.add([scored(i % 4, i)])
    with pytest.raises(RewardError, match=text):
        failures.add([scored(3, 7)])


def test_a_score_restarts_the_count() -> None:
    failures = Failures()
    for _ in range(3):
        failures.add([scored(i % 4, i, raises=i != 5) for i in range(100)])
        failures.add([scored(i % 4, i) for i in range(7)])


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_slow_check_of_a_server_has_no_score(is_stopped: bool) -> None:
    """A stopped worker simulates a machine that is too busy to apply the server's own time limit."""
    options: dict[str, dict[str, object]] = {"reward_model": {"timeout_s": 1.0}}
    with serving(lambda path, body: (200, [{"embedding": [0.5]}])) as url:
        options["reward_model"] |= {"url": url}
        with reward_pool([("reward_model", 1.0)], deadline_s=2, options=options) as pool:
            pool.wait_until_ready()
            (worker,) = pool.worker_pids
            if is_stopped:
                os.kill(worker, signal.SIGSTOP)
            pool.submit(0, "p", "r", "1", {})
            result = pool.collect()[0]
    name = "reward_model"
    if is_stopped:
        assert (result.total, result.verdicts, bool(result.errors)) == (None, {name: "timeout"}, True)
    else:
        assert (result.total, result.verdicts, result.errors) == (0.5, {name: "scored"}, {})
