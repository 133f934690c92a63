"""Conversations with real worker processes: `chat`, the built-in agent of rollout.tools, deaths and aborts."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.config.rollout import RolloutConfig
from grpo_mega.rollout.sessions.agents import AgentWorkers
from grpo_mega.rollout.sessions.session import Ended, Failed, TurnRequest, TurnResult
from grpo_mega.rollout.sessions.tool_schemas import tool_schemas
from tests.helpers.sessions import conversations, decode, prompt_of, result_of

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

HERE, NAME, AGENT = Path(__file__).resolve().parent, "qwen2.5", "agent_functions.run"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def workers(**keys: Any) -> AgentWorkers:
    rollout = RolloutConfig.model_validate({"agent_timeout_s": 120.0} | keys)
    return AgentWorkers(rollout, HERE, schemas=tool_schemas(rollout, HERE))


def reply(request: TurnRequest) -> TurnResult:
    return result_of(NAME, f"answer {request.number}")


def texts_of(end: Ended | Failed) -> list[str]:
    """Return the content of a sample's messages."""
    assert isinstance(end, Ended) and end.sample.messages is not None, end
    return [message["content"] for message in end.sample.messages]


def test_an_agent_in_a_worker_makes_a_sample_with_rewards_of_turns() -> None:
    with conversations(NAME, workers(agent=AGENT, agent_workers=2), reply) as run:
        for index in range(3):
            run.start(prompt_of(NAME, "talks 2", gold=7), index)
        run.start(prompt_of(NAME, "raises k"), 3)
        ends = {end.sample.index: end for end in (run.end() for _ in range(4)) if isinstance(end, Ended)}
    for index in range(3):
        sample = ends[index].sample
        assert (sample.finish_reason, sample.scores) == ("stop", {"first": 5.0, "second": 7.0})
        assert sample.step_rewards == [0.0, 0.5] and len(sample.sampled) == 2 and not sample.contexts
        assert {request.max_new_tokens for request in run.asked if request.key == (5, index)} == {5}
    assert ends[3].sample.verdicts == {"agent": "error"}


def test_tools_answer_calls_until_a_turn_has_none() -> None:
    def calls(request: TurnRequest) -> TurnResult:
        text = decode(NAME, request.context_ids)
        if request.number == 0:
            return result_of(NAME, ADD.replace("3}", "3"))
        return result_of(NAME, "It is 5." if "<tool_response>\n5\n</tool_response>" in text else ADD)

    with conversations(NAME, workers(tools=["agent_functions.add"]), calls) as run:
        run.start(prompt_of(NAME, "2 + 3?"))
        end = run.end()
    question, broken, error, call, result, answer = texts_of(end)
    assert (question, call, result, answer) == ("2 + 3?", "", "5", "It is 5.")
    assert broken.startswith("<tool_call>") and "this is not a tool call" in error
    assert isinstance(end, Ended) and len(end.sample.sampled) == 3
    assert len(end.sample.segments()) == 1, "the tools are in the prompt's place, and nothing is rewritten"
    assert '"name": "add"' in decode(NAME, end.sample.contexts[0].token_ids)


def test_calls_without_an_end_reach_the_limit_of_turns() -> None:
    tools = workers(tools=["agent_functions.add"], max_turns=3)
    with conversations(NAME, tools, lambda _: result_of(NAME, ADD), max_turns=3) as run:
        run.start(prompt_of(NAME))
        end = run.end()
    assert isinstance(end, Ended) and (end.sample.finish_reason, len(end.sample.sampled)) == ("turns", 3)


def test_samples_that_end_or_block_their_worker_fail_alone(tmp_path: Path) -> None:
    """All start in one worker, so each of them ends the others."""
    bad = ("dies", "blocks", "calls_back", "cancels", "stops", "closes", "kills_parent")
    good = ("talks 2", "dies_later", f"dies_once {tmp_path / 'file'}", "talks 2", "talks 2")
    warnings: list[str] = []
    with conversations(NAME, workers(agent=AGENT, tool_timeout_s=1.0), reply, warn=warnings.append) as run:
        for index, text in enumerate((*bad, *good)):
            run.start(prompt_of(NAME, text, number=index, gold=7), index)
        ends = [run.end() for _ in (*bad, *good)]
    samples = {end.sample.index: end.sample for end in ends if isinstance(end, Ended)}
    scores = [{"agent": 0.0}] * len(bad)
    talks = {"first": 5.0, "second": 7.0}
    assert [samples[index].scores for index in range(12)] == [
        *scores,
        talks,
        {"agent": 0.25},
        {"agent": 0.5},
        talks,
        talks,
    ]
    assert [samples[index].verdicts for index in range(12)] == [{"agent": "error"}] * len(bad) + [{}] * len(good)
    assert len(warnings) == 2 and ": samples start again, fewer in a worker, which takes time: " in warnings[0]
    assert "failed twice, so its sample scores 0: " in warnings[1]


def test_a_sample_that_blocks_after_a_limit_is_an_error_with_advice() -> None:
    warnings: list[str] = []
    agent = workers(agent=AGENT, tool_timeout_s=1.0)
    with conversations(
        NAME, agent, lambda _: result_of(NAME, "x" * 9, stop=None), max_response_length=9, warn=warnings.append
    ) as run:
        run.start(prompt_of(NAME, "talks_and_blocks"))
        end = run.end()
    assert isinstance(end, Ended) and (end.sample.finish_reason, end.sample.verdicts) == ("length", {"agent": "error"})
    for text, warning in zip((": samples start again", " failed twice"), warnings, strict=True):
        assert warning.startswith(f"rollout.agent{text}"), warning
        assert re.search(r"agent_functions.run blocked its event loop for 1 s \(in _blocks, .*; use await$", warning)


def test_an_abort_ends_agents_that_wait_for_a_turn() -> None:
    asked = threading.Event()

    def never(request: TurnRequest) -> TurnResult | None:
        asked.set()
        return None if request.prompt.id == 1 else reply(request)

    with conversations(NAME, workers(agent=AGENT), never) as run:
        run.start(prompt_of(NAME, "turns 1", number=1))
        run.start(prompt_of(NAME, "sleeps", number=1), 1)
        assert asked.wait(60)
        run.conversations.abort()
        assert run.ends.empty()
        run.start(prompt_of(NAME, "turns 1", number=2))
        assert texts_of(run.end()) == ["turns 1", "answer 0"]
