"""Conversations on the embedded engine: log-probs of every turn, the make-up of batches, late tools, early ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.embedded import engine as turns_module
from grpo_mega.rollout.embedded.decoder import Decoder, Start
from grpo_mega.rollout.embedded.engine import EmbeddedEngine
from grpo_mega.rollout.engine import RolloutRequest, Sampling, StopCondition
from grpo_mega.rollout.rollouts import Rollouts
from grpo_mega.rollout.sessions.session import Asked, Ended, TurnRequest, TurnResult
from grpo_mega.tracking.progress import Timers
from grpo_mega.types import Group, Prompt, Sample, Span
from tests.helpers.models import FAMILIES, MIXTURES, VOCAB_SIZE, make_model
from tests.helpers.scripted_conversations import Key, Script, ScriptedConversations, Talk
from tests.rollout.test_embedded import STOPS, make_engine, make_prompts

SAMPLING = Sampling(group_size=3, temperature=0.8, max_response_length=50, stop_token_ids=STOPS, seed=11)
SIMILAR = ("llama", "mixtral", "deepseek_v2", "glm4_moe", "qwen3_5_text")  # to other families
TALK = Talk(VOCAB_SIZE, STOPS, SAMPLING.max_response_length)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen2", seed=3)


def fresh() -> dict[int, Group]:
    return {index: Group(prompt, []) for index, prompt in enumerate(make_prompts())}


def converse(
    engine: EmbeddedEngine,
    conversations: Any,
    sampling: Sampling = SAMPLING,
    groups: Mapping[int, Group] | None = None,
    **others: Any,
) -> dict[int, Group]:
    request = RolloutRequest(groups or fresh(), sampling, 2, conversations=conversations, **others)
    return engine.generate(request)


def turns_of(conversations: ScriptedConversations) -> dict[tuple[Key, int], tuple[TurnRequest, TurnResult]]:
    found = {(request.key, request.number): (request, result) for request, result in conversations.turns}
    assert len(found) == len(conversations.turns)
    return found


def check_turn(model: Any, request: TurnRequest, result: TurnResult, temperature: float) -> None:
    """Compare with one forward pass over context and turn."""
    ids, start = torch.tensor([[*request.context_ids, *result.token_ids]]), len(request.context_ids)
    logits = model(input_ids=ids).logits[0, start - 1 : -1].double()
    expected = torch.log_softmax(logits / (temperature or 1.0), dim=-1).gather(1, ids[0, start:, None])[:, 0]
    found = torch.tensor(result.logprobs, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert temperature or result.token_ids == logits.argmax(dim=-1).tolist()
    stopped = result.token_ids[-1] in request.stop_token_ids
    assert result.finish_reason == ("stop" if stopped else "length")
    assert stopped or len(result.token_ids) == request.max_new_tokens
    assert not request.stop_token_ids & set(result.token_ids[:-1])


@pytest.mark.parametrize("temperature", [0.8, pytest.param(0.0, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.full] * (name in SIMILAR)) for name in (*FAMILIES, *MIXTURES)]
)
def test_log_probs_of_every_turn_equal_a_full_pass_over_its_context(family: str, temperature: float) -> None:
    mixed = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    changes = {"mistral": {"sliding_window": 9}, "qwen3": mixed}.get(family, {})
    model, conversations = make_model(family, seed=3, **changes), ScriptedConversations(TALK)
    engine = make_engine(model, 8) if family in FAMILIES else engine_of_experts(model, family)
    found = converse(engine, conversations, replace(SAMPLING, temperature=temperature))
    for request, result in conversations.turns:
        check_turn(model, request, result, temperature)
        assert result.version == 7
    samples = [sample for group in found.values() for sample in group.samples]
    assert len(samples) == 24 and max(len(sample.spans) for sample in samples) == 4
    assert any(sample.contexts for sample in samples) and {r.finish_reason for _, r in conversations.turns} > {"stop"}


def engine_of_experts(model: Any, family: str) -> EmbeddedEngine:
    from grpo_mega.rollout.embedded.model import checkpoint_tensors
    from grpo_mega.weights.boxes import region
    from grpo_mega.weights.families import family_of
    from grpo_mega.weights.spec import ModelShape

    shape = ModelShape.from_hf_config(model.config.to_dict())
    tensors = checkpoint_tensors(model, family_of(shape.model_type), shape)
    return make_engine(model, 8, lambda box: tensors[box.tensor][region(box.start, box.shape)])


def test_sequences_that_join_and_leave_have_the_tokens_of_separate_ones(model: Any) -> None:
    """Sequences of odd lengths join at random steps. The batch keeps no padding that its sequences do not need."""
    numbers, width = random.Random(4), 0
    contexts = [tuple(numbers.randrange(VOCAB_SIZE) for _ in range(numbers.choice((1, 3, 40)))) for _ in range(30)]
    starts = [Start(ids, None, numbers.choice((1, 2, 7, 20)), frozenset({5, 6})) for ids in contexts]
    greedy = replace(SAMPLING, temperature=0.0)

    def alone(start: Start) -> list[int]:
        decoder = Decoder(model, greedy)
        decoder.add({0: start})
        while not decoder.sample():
            decoder.advance()
        return decoder.found(0)[0]

    with torch.inference_mode():
        decoder, waiting, found = Decoder(model, greedy), dict(enumerate(starts)), dict[int, list[int]]()
        names: dict[int, int] = {}
        while waiting or decoder.is_running:
            free = [slot for slot in range(6) if slot not in names]
            taken = list(waiting)[: min(len(free), numbers.randrange(4))]
            new = {slot: waiting.pop(name) for slot, name in zip(free, taken, strict=False)}
            names |= dict(zip(free, taken, strict=False))
            if new:
                decoder.join(new)
                live = [len(starts[names[slot]].context) for slot in new]
                width = max(width, decoder._cohorts[0].mask.shape[1])
                assert width <= 40 + 20 and decoder._cohorts[0].mask.sum(dim=1).max() >= max(live)
            for slot, _ in decoder.sample():
                found[names.pop(slot)] = decoder.found(slot)[0]
            decoder.advance()
        assert [found[name] for name in range(30)] == [alone(start) for start in starts]


def test_a_turn_prefills_only_what_its_conversation_has_not_seen(model: Any) -> None:
    """Also after a rewritten history: the common start is not computed again. Windows compute everything."""
    base, others = tuple(range(20, 33)), (3, 4, 5)

    def script(key: Key, prompt: Prompt, step: int) -> Script:
        context, tokens = base, list[int]()
        for number in range(5):
            result = yield TurnRequest(key, prompt, number, context, 6, frozenset(), step)
            tokens += result.token_ids
            context = (*context, *result.token_ids, *others) if number != 2 else (*base[:5], *others)
        return Sample(prompt, key[1], tokens, [0.0] * len(tokens), "stop", sampled=[(0, len(tokens))])

    def prefills(model: Any) -> list[int]:
        widths, engine, conversations = list[int](), make_engine(model, 8), ScriptedConversations(script)
        engine._model.register_forward_pre_hook(
            lambda module, args, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        converse(engine, conversations, replace(SAMPLING, group_size=1), {0: fresh()[0]})
        for request, result in conversations.turns:
            check_turn(model, request, result, SAMPLING.temperature)
        return [width for width in widths if width > 1]

    assert prefills(model) == [13, 1 + 3, 1 + 3, 3, 1 + 3]
    windows = make_model("mistral", seed=3, sliding_window=9)
    assert prefills(windows) == [13, 13 + 9, 13 + 18, 8, 8 + 9]


def joins_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Return a list that gets the clock and the contexts of every join."""
    joins: list[tuple[int, list[tuple[int, ...]]]] = []
    join = Decoder.join

    def noted(decoder: Decoder, starts: Mapping[int, Start]) -> None:
        joins.append((decoder.num_steps, [start.context for start in starts.values()]))
        join(decoder, starts)

    monkeypatch.setattr(Decoder, "join", noted)
    return joins


class Delayed(ScriptedConversations):
    """Puts events from other threads, in a random order and after random pauses."""

    def __init__(self, seed: int) -> None:
        super().__init__(TALK)
        self._numbers, self._timers, put = random.Random(seed), list[threading.Timer](), self.events.put
        self.events = SimpleNamespace(get=self.events.get, empty=self.events.empty, put=self._later(put))  # type: ignore[assignment]

    def _later(self, put: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda event: threading.Timer(self._numbers.choice((0, 0.001, 0.05)), put, [event]).start()


def test_batches_and_log_probs_do_not_depend_on_the_speed_of_tools(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "LATE_S", 600.0)
    joins, engine = joins_of(monkeypatch), make_engine(model, 9)
    histories = []
    for conversations in (ScriptedConversations(TALK), Delayed(1), Delayed(2)):
        joins.clear()
        order: list[tuple[int, int]] = []
        found = converse(
            engine, conversations, on_sample=lambda s, _, order=order: order.append((s.prompt.id, s.index))
        )
        samples = [(list(s.response_ids), list(s.rollout_logprobs), s) for g in found.values() for s in g.samples]
        histories.append((list(joins), order, samples))
    assert histories[0] == histories[1] == histories[2]
    assert len(histories[0][0]) > 5 and max(len(contexts) for _, contexts in histories[0][0]) > 2


@pytest.mark.parametrize("max_concurrent", [1, 5])
def test_a_turn_is_the_same_however_many_conversations_run(model: Any, max_concurrent: int) -> None:
    expected, found = ScriptedConversations(TALK), ScriptedConversations(TALK)
    converse(make_engine(model), expected)
    shuffled = dict(random.Random(3).sample(list(fresh().items()), 8))
    converse(make_engine(model, max_concurrent), found, replace(SAMPLING, longest_first=True), shuffled)
    theirs = turns_of(expected)
    assert theirs.keys() == turns_of(found).keys()
    for name, (request, result) in turns_of(found).items():
        assert (request, result.token_ids) == (theirs[name][0], theirs[name][1].token_ids)
        assert result.logprobs == pytest.approx(theirs[name][1].logprobs, abs=1e-5)


def test_streams_of_turns_depend_on_context_seed_step_and_sample(model: Any) -> None:
    """A script asks for one turn with a given context, step and sample index."""

    def first(ids: tuple[int, ...] = (3, 4), seed: int = 1, step: int = 2, index: int = 0, prompt_id: int = 5) -> Any:
        def script(key: Key, prompt: Prompt, _: int) -> Script:
            result = yield TurnRequest(key, prompt, 0, (9, 9, *ids), 12, frozenset(), step)
            return Sample(prompt, key[1], result.token_ids, result.logprobs, "stop")

        groups = {0: Group(Prompt(prompt_id, "", (1,), ""), [])}
        sampling = replace(SAMPLING, seed=seed, group_size=3, temperature=4.0)
        return (
            converse(make_engine(model), ScriptedConversations(script), sampling, groups)[0].samples[index].response_ids
        )

    assert first() == first()
    others = [first(ids=(4, 3)), first(seed=2), first(step=3), first(index=1), first(prompt_id=6)]
    assert len({tuple(ids) for ids in (first(), *others)}) == 6


def test_a_slow_tool_delays_other_conversations_only_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversations continue only when all others have ended, so the test hangs if the engine waits for them."""
    monkeypatch.setattr(turns_module, "LATE_S", 0.2)
    loops: list[turns_module.TurnLoop] = []
    run = turns_module.TurnLoop.run
    monkeypatch.setattr(turns_module.TurnLoop, "run", lambda loop: (loops.append(loop), run(loop)))
    total = sum(TALK.num_turns((i, j)) for i in range(8) for j in range(3))
    slow = {((2, 1), 1), ((5, 2), 1)}
    before = total + 24 - sum(TALK.num_turns(key) for key, _ in slow)  # turns and ends without the rest of the slow
    conversations = ScriptedConversations(TALK, held=dict.fromkeys(slow, before))
    found = converse(make_engine(model, 9), conversations)
    assert all(group.is_complete(3) for group in found.values()) and len(conversations.turns) == total
    assert set(conversations.ended[-2:]) == {(2, 1), (5, 2)}
    assert 0.2 / 4 <= loops[0]._patience < 0.2
    for request, result in conversations.turns:
        check_turn(model, request, result, SAMPLING.temperature)


class AtDeadline(ScriptedConversations):
    """Ends conversation (2, 1) at its deadline, once another turn was answered while its own is being decoded."""

    def answer(self, request: TurnRequest, result: TurnResult) -> None:
        assert request.key != (2, 1)
        super().answer(request, result)
        if (2, 1) in self._running:
            del self._running[2, 1]
            self.events.put(Ended(2, Sample(make_prompts()[2], 1, [], [], "deadline")))


def test_a_turn_is_given_up_when_its_conversation_has_ended(model: Any) -> None:
    def script(key: Key, prompt: Prompt, step: int) -> Script:
        if key == (2, 1):
            yield TurnRequest(key, prompt, 0, prompt.token_ids, 50, frozenset(), step)
        return (yield from TALK(key, prompt, step))

    conversations = AtDeadline(script)
    found = converse(make_engine(model, 6), conversations)  # others need the place
    assert all(group.is_complete(3) for group in found.values()) and conversations.num_aborts == 0
    assert found[2].samples[1].finish_reason == "deadline" and not found[2].samples[1].response_ids
    for request, result in conversations.turns:
        check_turn(model, request, result, SAMPLING.temperature)


class Restarting(ScriptedConversations):
    """Asks for every first turn twice, like a conversation that starts again while its turn is being decoded."""

    def start(self, prompt_index: int, sample_index: int, prompt: Prompt, step: int) -> None:
        super().start(prompt_index, sample_index, prompt, step)
        first = TurnRequest((prompt_index, sample_index), prompt, 0, prompt.token_ids, 9, STOPS, step)
        self.events.put(Asked(first))

    def answer(self, request: TurnRequest, result: TurnResult) -> None:
        if (request.key, request.number) not in turns_of(self):
            super().answer(request, result)


@pytest.mark.parametrize("max_concurrent", [3, 256])
def test_a_turn_may_be_asked_for_again_while_it_is_decoded(model: Any, max_concurrent: int) -> None:
    expected, conversations = ScriptedConversations(TALK), Restarting(TALK)
    converse(make_engine(model), expected)
    found = converse(make_engine(model, max_concurrent), conversations)
    assert all(group.is_complete(3) for group in found.values())
    theirs = turns_of(expected)
    assert {name: one[1].token_ids for name, one in turns_of(conversations).items()} == {
        name: one[1].token_ids for name, one in theirs.items()
    }


def enough(wanted: int) -> StopCondition:
    return StopCondition(Rendezvous(HashStore(), 0, 1), wanted)


def test_a_phase_that_ends_early_discards_running_conversations(model: Any) -> None:
    engine, conversations, stop = make_engine(model, 9), ScriptedConversations(TALK), enough(2)
    found = converse(engine, conversations, stop=stop)
    done = [index for index, group in found.items() if group.is_complete(3)]
    assert sorted(done) == sorted(stop.clocks) and 2 <= len(done) < 8
    assert conversations.num_aborts == 1 and conversations.aborted and conversations.events.empty()
    started, ended = set(conversations.started), set(conversations.ended)
    assert started == ended | conversations.aborted and len(started) < 24
    samples = {(index, s.index): s for index, group in found.items() for s in group.samples}
    assert samples.keys() <= ended and all(sample.is_finished for sample in samples.values())
    again = ScriptedConversations(TALK)
    rest = converse(engine, again, groups={index: group for index, group in found.items() if index not in done})
    assert sorted(again.started) == sorted({(i, j) for i in range(8) for j in range(3)} - samples.keys())
    assert all(group.is_complete(3) for group in rest.values()) and again.num_aborts == 0
    assert all(samples[i, s.index] is s for i, g in rest.items() for s in g.samples if (i, s.index) in samples)


def test_a_phase_ends_early_while_only_late_conversations_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank finishes the last wanted group while the conversation of this rank never continues."""
    monkeypatch.setattr(turns_module, "LATE_S", 0.05)
    stop, conversations = enough(1), ScriptedConversations(TALK, held={((0, 1), 1): 10**9})
    conversations.held |= {((0, 0), 0): 10**9, ((0, 2), 0): 10**9}
    is_met = stop.is_met

    def looked(clock: int = 0) -> bool:
        if turns_of(conversations).keys() == {((0, 1), 0)} and not stop.clocks:
            stop.done(99, clock=10**6)
        return is_met(clock)

    monkeypatch.setattr(stop, "is_met", looked)
    found = converse(make_engine(model), conversations, groups={0: fresh()[0]}, stop=stop)
    assert found[0].samples == [] and conversations.aborted == {(0, 0), (0, 1), (0, 2)}


def test_a_failed_conversation_is_a_failure_that_a_restart_clears(model: Any) -> None:
    engine, conversations = make_engine(model, 9), ScriptedConversations(TALK, failing={(3, 1)})
    found = converse(engine, conversations)
    assert engine.failure == "a conversation in step 2 failed: the worker of sample (3, 1) died"
    assert found and 3 not in found and all(group.is_complete(3) for group in found.values())
    assert conversations.num_aborts == 1 and conversations.events.empty()
    engine.restart([0])
    assert engine.failure is None
    rest = converse(engine, conversations, groups={i: g for i, g in fresh().items() if i not in found})
    assert sorted([*found, *rest]) == list(range(8)) and all(group.is_complete(3) for group in rest.values())


def test_an_error_while_samples_are_reported_ends_all_conversations(model: Any) -> None:
    def refuse(sample: Sample, group: Group) -> None:
        raise ZeroDivisionError

    conversations = ScriptedConversations(TALK)
    with pytest.raises(ZeroDivisionError):
        converse(make_engine(model, 9), conversations, on_sample=refuse)
    assert conversations.num_aborts == 1 and conversations.events.empty()


def test_the_sample_of_an_agent_without_a_turn_is_returned(model: Any) -> None:
    def script(key: Key, prompt: Prompt, step: int) -> Script:
        if key[1] == 1:
            return Sample(prompt, 1, [], [], "stop", [Span(7, 0, 0)])
        return (yield from TALK(key, prompt, step))

    found = converse(make_engine(model), ScriptedConversations(script))
    assert [found[i].samples[1].spans for i in found] == [[(7, 0, 0)]] * 8
    assert all(group.oldest_version == 7 for group in found.values())


def test_phases_score_conversations_and_repeat_the_groups_of_a_failure(model: Any) -> None:
    engine, conversations = make_engine(model, 9), ScriptedConversations(TALK, failing={(3, 1)})
    submitted, groups_submitted = list[Sample](), list[list[Sample]]()
    config: Any = SimpleNamespace(rollout=RolloutConfig(phase_deadline_s=600), log=SimpleNamespace(progress=True))
    scorer: Any = SimpleNamespace(submit=submitted.append, submit_group=groups_submitted.append)
    rollouts = Rollouts(
        config=config,
        engine=engine,
        recover=lambda version: engine.restart([0]),
        rendezvous=Rendezvous(HashStore(), 0, 1),
        scorer=scorer,
        sampling=SAMPLING,
        decode=str,
        timers=Timers(),
        warn=print,
        ranks=None,
        raise_on_all_ranks=nullcontext,
        conversations=conversations,  # type: ignore[arg-type]
    )
    groups = list(fresh().values())
    phase = rollouts.generate(groups, 7, "test")
    assert phase.kept == list(range(8)) and all(group.is_complete(3) for group in phase.mine.values())
    samples = {id(sample) for group in phase.mine.values() for sample in group.samples}
    assert samples <= {id(sample) for sample in submitted} and len(submitted) > 24
    assert {id(sample) for one in groups_submitted for sample in one} == samples and len(groups_submitted) == 8
    seconds = rollouts._usage["seconds"]
    assert rollouts.flush_usage()["seconds/idle"] < seconds and engine.failure is None
    greedy = rollouts.generate(groups, 7, "evaluation", sampling=replace(SAMPLING, temperature=0.0, group_size=1))
    assert [len(greedy.mine[index].samples) for index in greedy.kept] == [1] * 8
    assert rollouts.flush_usage() == {}
