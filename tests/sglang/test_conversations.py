"""Conversations on the server shared by these files: log-probs of every turn, early ends, failures, slow tools."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.rollout.sessions.session import Ended, TurnRequest
from grpo_mega.rollout.sglang.client import Event, request_body
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.rollout.sglang.turns import Turns
from grpo_mega.types import Group, Prompt, Sample, Span
from tests.helpers.scripted_conversations import Key, Script, ScriptedConversations, Talk
from tests.helpers.servers import MODEL, is_true_within
from tests.rollout.test_turns import check_turn
from tests.sglang.test_generation import connected, enough, load_of, session_of, update_to

pytestmark = pytest.mark.sglang

STOPS = frozenset(range(1, 256, 9))
SAMPLING = Sampling(group_size=3, temperature=0.8, max_response_length=60, stop_token_ids=STOPS, seed=11)
PROMPTS = {index: Prompt(100 + index, "", tuple(range(5, 8 + index)), "") for index in range(8)}
TALK = Talk(256, STOPS, SAMPLING.max_response_length)


@pytest.fixture(scope="module")
def weights() -> Any:
    """Return a transformers model whose log-probs depend on the context."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        sizes = {key: value for key, value in MODEL.items() if key not in ("architectures", "model_type", "dtype")}
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.15))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def loaded(server: Server, model: Path, weights: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the shared server these weights, and its own ones again at the end."""
    folder = tmp_path_factory.mktemp("weights")
    torch.save(weights.state_dict(), folder / "x.hf")
    with connected(server, model, folder) as engine:
        update_to(engine, 0, folder / "y.save")
        update_to(engine, 7, folder / "x.hf")
    yield
    with connected(server, model, folder) as engine:
        update_to(engine, 0, folder / "y.restore")


@pytest.fixture
def engine(server: Server, model: Path, tmp_path: Path, loaded: None) -> Iterator[SGLangEngine]:
    with connected(server, model, tmp_path, stall_deadline_s=30) as one:
        one.version = 7
        yield one


def converse(
    engine: SGLangEngine,
    conversations: Any,
    sampling: Sampling = SAMPLING,
    groups: Mapping[int, Group] | None = None,
    **others: Any,
) -> dict[int, Group]:
    groups = groups or {index: Group(prompt, []) for index, prompt in PROMPTS.items()}
    return engine.generate(RolloutRequest(groups, sampling, 2, conversations=conversations, **others))


@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_log_probs_of_every_turn_equal_transformers(engine: SGLangEngine, weights: Any, temperature: float) -> None:
    conversations, heard = ScriptedConversations(TALK), list[Sample]()
    sampling = replace(SAMPLING, temperature=temperature)
    found = converse(engine, conversations, sampling, on_sample=lambda sample, _: heard.append(sample))
    assert engine.failure is None, engine.failure
    assert sorted(found) == sorted(PROMPTS) and all(group.is_complete(3) for group in found.values())
    assert len(heard) == 24 and conversations.num_aborts == 0 and conversations.sampling == sampling
    assert len(conversations.turns) > 50
    for request, result in conversations.turns:
        check_turn(weights, request, result, temperature)
        assert result.version == 7
    samples = {(index, s.index): s for index, group in found.items() for s in group.samples}
    for request, result in conversations.turns:
        start, end = samples[request.key].sampled[request.number]
        assert samples[request.key].response_ids[start:end] == result.token_ids


def test_a_phase_that_ends_early_discards_running_conversations(
    server: Server, engine: SGLangEngine, weights: Any
) -> None:
    long = Talk(256, frozenset({1}), 400, max_new_tokens=100)
    sampling, stop = replace(SAMPLING, max_response_length=400), enough(2)
    conversations = ScriptedConversations(long, held={((3, 0), 1): 10**9})
    found = converse(engine, conversations, sampling, stop=stop)
    assert engine.failure is None, engine.failure
    assert load_of(server) == (0, 0) and conversations.num_aborts == 1 and (3, 0) in conversations.aborted
    done = [index for index, group in found.items() if group.is_complete(3)]
    assert 2 <= len(done) < 8 and sorted(done) == sorted(stop.clocks)
    assert all(sample.is_finished for group in found.values() for sample in group.samples)
    again = ScriptedConversations(TALK)
    rest = converse(engine, again, groups={index: group for index, group in found.items() if index not in done})
    assert engine.failure is None and all(group.is_complete(3) for group in rest.values())
    assert len(again.started) == sum(3 - len(found[index].samples) for index in rest)
    for request, result in again.turns:
        check_turn(weights, request, result, SAMPLING.temperature)


def test_a_dead_server_ends_all_conversations_and_lost_ones_start_again(
    engine: SGLangEngine, server: Server, weights: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server seems dead once a tool has waited for nothing. Its answers of later turns are ignored."""
    conversations = ScriptedConversations(TALK, held={((3, 0), 1): 10**9})
    with monkeypatch.context() as patch:
        patch.setattr(server, "is_alive", lambda: len(conversations.ended) < 12)
        found = converse(engine, conversations)
    assert engine.failure is not None and "died, generating in step 2" in engine.failure
    assert conversations.num_aborts == 1 and conversations.events.empty() and (3, 0) in conversations.aborted
    assert len(found) < 8 and 3 not in found and all(group.is_complete(3) for group in found.values())
    engine.failure = None
    rest_of = {index: Group(prompt, []) for index, prompt in PROMPTS.items() if index not in found}
    conversations.held.clear()
    rest = converse(engine, conversations, groups=rest_of)
    assert engine.failure is None and sorted([*found, *rest]) == sorted(PROMPTS)
    assert all(group.is_complete(3) for group in rest.values()) and conversations.num_aborts == 1
    for request, result in conversations.turns:
        check_turn(weights, request, result, SAMPLING.temperature)


def test_a_tool_that_is_slower_than_the_stall_deadline_is_no_hang(
    server: Server, model: Path, tmp_path: Path, loaded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool answers once the engine has asked twice for the server's health."""
    conversations, num_asked = ScriptedConversations(TALK, held={((3, 0), 1): 10**9}), 0
    with connected(server, model, tmp_path, stall_deadline_s=1, start_deadline_s=1) as engine:
        session, is_healthy = session_of(engine), session_of(engine).is_healthy

        async def asked(deadline_s: float) -> bool:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 2:
                conversations.release()
            return await is_healthy(30)

        monkeypatch.setattr(session, "is_healthy", asked)
        found = converse(engine, conversations)
        assert engine.failure is None, engine.failure
    assert num_asked >= 2 and all(group.is_complete(3) for group in found.values()) and len(found) == 8


def test_a_phase_longer_than_its_deadline_is_a_failure(
    server: Server, model: Path, tmp_path: Path, loaded: None
) -> None:
    conversations = ScriptedConversations(TALK, held={((3, 0), 1): 10**9})
    with connected(server, model, tmp_path, phase_deadline_s=3) as engine:
        found = converse(engine, conversations)
        assert engine.failure is not None and "is not done after" in engine.failure
    assert 3 not in found and conversations.num_aborts == 1


def test_conversations_that_end_during_their_turns_leave_a_usable_server(
    server: Server, engine: SGLangEngine, weights: Any
) -> None:
    conversations = EndedByDeadline(endless_turn)
    endless = replace(SAMPLING, group_size=1, max_response_length=480, stop_token_ids=frozenset())
    found = converse(engine, conversations, endless)
    assert engine.failure is None and all(group.is_complete(1) for group in found.values()) and len(found) == 8
    assert {tuple(s.spans) for group in found.values() for s in group.samples} == {(Span(7, 0, 0),)}
    assert not conversations.turns
    again = ScriptedConversations(TALK)
    converse(engine, again)
    assert engine.failure is None and is_true_within(60, lambda: load_of(server) == (0, 0))
    for request, result in again.turns:
        check_turn(weights, request, result, SAMPLING.temperature)


def test_a_turn_whose_context_leaves_room_for_one_token_is_sampled(engine: SGLangEngine, weights: Any) -> None:
    """SGLang itself refuses inputs of the last 6 tokens of its context length."""

    def script(key: Key, prompt: Prompt, step: int) -> Script:
        result = yield TurnRequest(
            key, prompt, 0, tuple(number % 256 for number in range(3, 513 - key[0])), 1, STOPS, step
        )
        return Sample(prompt, key[1], result.token_ids, result.logprobs, "length", [Span(7, 0, 1)])

    conversations = ScriptedConversations(script)
    found = converse(engine, conversations)
    assert engine.failure is None and all(group.is_complete(3) for group in found.values())
    assert max(len(request.context_ids) for request, _ in conversations.turns) == 510
    for request, result in conversations.turns:
        check_turn(weights, request, result, SAMPLING.temperature)


class EndedByDeadline(ScriptedConversations):
    """Ends all conversations once each has asked for a turn."""

    def start(self, prompt_index: int, sample_index: int, prompt: Prompt, step: int) -> None:
        super().start(prompt_index, sample_index, prompt, step)
        if len(self.started) == len(PROMPTS):
            for key in list(self._running):
                del self._running[key]
                self.events.put(Ended(key[0], Sample(PROMPTS[key[0]], key[1], [], [], "deadline", [Span(7, 0, 0)])))


def endless_turn(key: Key, prompt: Prompt, step: int) -> Script:
    yield TurnRequest(key, prompt, 0, prompt.token_ids, 480, frozenset(), step)
    raise AssertionError("the turn was answered")


class Requests:
    """The place of a session: it notes requests."""

    is_aborting = False

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.futures: list[Future[None]] = []
        self.on_event: list[Callable[[Event], None]] = []

    def generate(
        self, prompt_index: int, samples: list[Sample], sampling: Sampling, step: int, on_event: Any
    ) -> Future[None]:
        self.bodies.append(request_body(samples, sampling, step, is_seeded=True))
        self.on_event.append(on_event)
        self.futures.append(Future())
        return self.futures[-1]


def test_a_turn_is_a_request_with_its_context_limits_and_seed() -> None:
    prompt = replace(PROMPTS[2], id=9)
    turn = TurnRequest((2, 1), prompt, 1, (5, 6, 9), 17, frozenset({4, 2}), step=3)
    others = [
        replace(turn, context_ids=(5, 9, 6)),
        replace(turn, key=(2, 0)),
        replace(turn, step=4),
        replace(turn, prompt=prompt_of(10)),
    ]
    bodies = [body_of(one, SAMPLING) for one in (turn, *others)] + [body_of(turn, replace(SAMPLING, seed=12))]
    seeds = [body["sampling_params"][0].pop("sampling_seed") for body in bodies]
    assert len(set(seeds)) == 6 and seeds[0] == body_of(turn, SAMPLING)["sampling_params"][0]["sampling_seed"]
    assert bodies[0]["input_ids"] == [[5, 6, 9]] and bodies[0]["return_logprob"]
    [params] = bodies[0]["sampling_params"]
    assert params == {"max_new_tokens": 17, "temperature": 0.8, "top_p": 1.0, "top_k": -1, "stop_token_ids": [2, 4]}


def prompt_of(number: int) -> Prompt:
    return replace(PROMPTS[2], id=number)


def body_of(turn: TurnRequest, sampling: Sampling) -> dict[str, Any]:
    """Return the request that the engine sends for this turn."""

    def script(key: Key, prompt: Prompt, step: int) -> Script:
        yield turn
        raise AssertionError

    requests, conversations = Requests(), ScriptedConversations(script)
    turns = Turns(requests, conversations, sampling)  # type: ignore[arg-type]
    turns.generate(2, [Sample(turn.prompt, 1, [], [], None)], sampling, 3)
    with pytest.raises(queue.Empty):
        turns.next_event(0)
    [body] = requests.bodies
    return body


def test_a_servers_error_is_reported_once_and_later_answers_are_ignored() -> None:
    requests, conversations = Requests(), ScriptedConversations(TALK)
    turns = Turns(requests, conversations, SAMPLING)  # type: ignore[arg-type]
    turns.generate(2, [Sample(PROMPTS[2], index, [], [], None) for index in range(3)], SAMPLING, 3)
    with pytest.raises(queue.Empty):
        turns.next_event(0)
    requests.on_event[1](Event(2, error="the server refused a request"))
    event = turns.next_event(0)
    assert (event.prompt_index, event.error) == (2, "the server refused a request")
    turns.end()
    assert conversations.aborted == {(2, 0), (2, 1), (2, 2)}
    requests.on_event[0](Event(2, error="the server died"))
    requests.on_event[2](Event(2, Sample(PROMPTS[2], 2, [4], [-1.0], "stop", [Span(7, 0, 1)])))
    assert conversations.events.empty() and not conversations.turns


def test_the_request_of_a_turn_is_cancelled_when_its_conversation_ends() -> None:
    requests, conversations = Requests(), ScriptedConversations(TALK)
    turns = Turns(requests, conversations, SAMPLING)  # type: ignore[arg-type]
    turns.generate(2, [Sample(PROMPTS[2], index, [], [], None) for index in range(3)], SAMPLING, 3)
    conversations.events.put(Ended(2, ended := Sample(PROMPTS[2], 1, [], [], "deadline", [Span(7, 0, 0)])))
    event = turns.next_event(0)
    assert event.sample is ended
    assert [future.cancelled() for future in requests.futures] == [False, True, False]
    requests.is_aborting = True
    conversations.abort()
    with pytest.raises(queue.Empty):
        turns.next_event(0)
    requests.on_event[0](Event(2, aborted=()))
    requests.on_event[2](Event(2, aborted=()))
    left = [turns.next_event(0).aborted for _ in range(2)]
    assert sorted(sample.index for aborted in left for sample in aborted or ()) == [0, 2]
