"""Scores of conversations: of the agent function, or of functions that get the last turn and all messages."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.config.data import RewardsConfig
from grpo_mega.errors import RewardError
from grpo_mega.rewards import RewardPool, registry
from grpo_mega.rewards.scorer import MIN_SAMPLES, Scorer, own_result
from grpo_mega.types import Prompt, Sample
from tests.helpers.reward_pools import reward_pool

HERE = str(Path(__file__).resolve().parent)
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "12"}]


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def sample(index: int = 0, text: str = "3 4<user>12", last: int = 9, **fields: Any) -> Sample:
    prompt = Prompt(fields.pop("id", 0), "q", (1,), "12", raw_columns={"prompts": "q"})
    known: dict[str, Any] = {"finish_reason": "stop", "messages": MESSAGES, "sampled": [(0, 3), (last, len(text))]}
    return Sample(prompt, index, list(map(ord, text)), [0.0] * len(text), **known | fields)


def score(pool: RewardPool, *samples: Sample) -> Scorer:
    scorer = Scorer(pool, decode)
    scorer.submit(samples[0])
    scorer.submit_group(samples)
    scorer.finish()
    return scorer


@pytest.fixture(scope="module")
def no_functions() -> Iterator[RewardPool]:
    with RewardPool(RewardsConfig(functions=())) as pool:
        assert not pool.worker_pids
        yield pool


def test_the_rewards_of_an_agent_add_up_and_keep_their_names(no_functions: RewardPool) -> None:
    named = sample(scores={"a": 1.0, "b": 0.5}, step_ends=[2, 10], step_rewards=[0.25, 1.0])
    raised = sample(1, scores={"agent": 0.0}, verdicts={"agent": "error"})
    cut = sample(2, finish_reason="length")
    scorer = score(no_functions, named, raised, cut)
    assert (named.reward, named.scores, named.verdicts) == (1.5, {"a": 1.0, "b": 0.5}, {"a": "scored", "b": "scored"})
    assert (named.step_ends, named.step_rewards) == ([2, 10], [0.25, 1.0])
    assert (raised.reward, raised.scores, raised.verdicts) == (0.0, {"a": 0.0, "b": 0.0}, {"a": "error", "b": "error"})
    assert (cut.reward, cut.scores, cut.verdicts) == (0.0, {"a": 0.0, "b": 0.0}, {"a": "length", "b": "length"})
    assert scorer.first_error == "a: the agent function; the log has the error"


def test_an_agent_without_a_score_needs_reward_functions(no_functions: RewardPool) -> None:
    results = [own_result(sample(id=i), ["agent"]) for i in range(MIN_SAMPLES)]
    assert {result.total for result in results} == {None}
    with pytest.raises(RewardError, match=r"rollout.agent returned None, and rewards.functions is empty"):
        score(no_functions, *(sample(id=i) for i in range(MIN_SAMPLES))).check()


def test_samples_of_dropped_groups_are_forgotten(no_functions: RewardPool) -> None:
    kept, scorer = sample(scores={"agent": 1.0}), Scorer(no_functions, decode)
    scorer.submit(kept)
    scorer.keep([])
    scorer.finish()
    assert kept.reward is None


@pytest.mark.pool
def test_functions_get_the_last_turn_and_all_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    functions = [("accuracy", 1.0), ("user_functions.num_messages", 1.0), ("user_functions.end_of_last_turn", 1.0)]
    with reward_pool(functions) as pool:
        right = sample(step_ends=[2, 10], step_rewards=[0.25, 1.0])
        wrong = sample(1, "12<tool>3 ", last=8)
        own = sample(2, scores={"agent": 7.0})
        score(pool, right, wrong, own)
    assert right.scores == {"accuracy": 1.0, "user_functions.num_messages": 2.0, "user_functions.end_of_last_turn": 5.0}
    assert wrong.scores["accuracy"] == 0.0, "an answer of an earlier turn does not count"
    assert (own.reward, own.scores) == (7.0, {"agent": 7.0})
    assert (right.step_ends, right.step_rewards) == ([2, 10], [0.25, 6.0])


def test_trl_functions_get_all_messages_after_the_prompt() -> None:
    def reward(completions: list[Any], messages: list[Any]) -> list[float]:
        return [len(c) + 10 * len(m) for c, m in zip(completions, messages, strict=True)]

    samples = [("q", "12", "12", {})] * 2
    other = [*MESSAGES, *MESSAGES]
    other[0] = {"role": "user", "content": "other"}
    assert registry.call_group(reward, samples, {"prompts": "q"}, [[], []], "messages", [MESSAGES, other]) == [21, 44]
    assert registry.call_group(reward, samples, {"prompts": "q"}, [[], []], "text", [MESSAGES, other]) == [22, 42]
