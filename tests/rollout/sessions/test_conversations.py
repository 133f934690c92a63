"""Conversations start, end, are aborted and repeated, and each one ends in exactly one event."""

import json
import queue
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mega.errors import ConfigError
from grpo_mega.rollout.sessions.session import Ended, Failed, TurnRequest, TurnResult
from tests.helpers.sessions import ThreadWorkers, conversations, prompt_of, result_of, user
from tools import chat_families
from tools.chat_families import Family

NAME = "qwen2.5"


def post(base_url: str, key: str, messages: list[Any]) -> dict[str, Any]:
    """Return the answer of the endpoint. Raise HTTPError."""
    data = json.dumps({"messages": messages}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", data, headers)) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def reply(request: TurnRequest) -> TurnResult:
    return result_of(NAME, f"answer {request.number}", version=request.number)


def two_turns(base_url: str, key: str, prompt: SimpleNamespace) -> dict[str, Any]:
    """Return both answers."""
    first = post(base_url, key, prompt.messages)
    second = post(base_url, key, [*prompt.messages, first["choices"][0]["message"], user("more")])
    return {"first": first, "second": second}


def test_a_conversation_ends_with_its_sample_and_the_agents_scores() -> None:
    def agent(base_url: str, key: str, prompt: SimpleNamespace) -> SimpleNamespace:
        answers = two_turns(base_url, key, prompt)
        return SimpleNamespace(value={"a": 1.0, "b": 0.0}, turn_rewards={answers["second"]["id"]: 0.25})

    with conversations(NAME, agent, reply) as run:
        run.start(prompt_of(NAME, level="easy"), 3)
        end = run.end()
    assert isinstance(end, Ended) and end.prompt_index == 5
    sample = end.sample
    assert (sample.index, sample.finish_reason, sample.scores) == (3, "stop", {"a": 1.0, "b": 0.0})
    assert sample.step_rewards == [0.0, 0.25] and sample.step_ends == [
        sample.sampled[0][1] - 1,
        sample.response_len - 1,
    ]
    assert [span.version for span in sample.spans] == [0, 1]
    assert [request.key for request in run.asked] == [(5, 3)] * 2 and run.asked[0].step == 1
    assert run.asked[0].context_ids == sample.prompt.token_ids


def test_an_agent_that_raises_scores_zero_and_warns_once() -> None:
    warnings: list[str] = []

    def agent(base_url: str, key: str, prompt: SimpleNamespace) -> SimpleNamespace:
        post(base_url, key, prompt.messages)
        return SimpleNamespace(kind="raised", error="KeyError: 'x'")

    with conversations(NAME, agent, reply, warn=warnings.append) as run:
        for index in range(2):
            run.start(prompt_of(NAME), index)
        ends = [run.end() for _ in range(2)]
    assert all(isinstance(end, Ended) and end.sample.scores == {"agent": 0.0} for end in ends)
    assert all(isinstance(end, Ended) and end.sample.verdicts == {"agent": "error"} for end in ends)
    assert len(warnings) == 1 and "KeyError: 'x'" in warnings[0]


def test_the_deadline_is_a_finish_reason_and_pending_turns_are_refused() -> None:
    refused = queue.SimpleQueue[int]()
    asked = threading.Event()

    def agent(base_url: str, key: str, prompt: SimpleNamespace) -> SimpleNamespace:
        def ask() -> None:
            try:
                post(base_url, key, prompt.messages)
            except urllib.error.HTTPError as error:
                refused.put(error.code)

        threading.Thread(target=ask, daemon=True).start()
        assert asked.wait(60)
        return SimpleNamespace(kind="deadline")

    def never(request: TurnRequest) -> None:
        asked.set()

    with conversations(NAME, agent, never) as run:
        run.start(prompt_of(NAME))
        end = run.end()
        assert refused.get(timeout=60) == 410
        run.conversations.answer(run.asked[0], result_of(NAME, "too late"))
    assert isinstance(end, Ended) and end.sample.finish_reason == "deadline"
    assert (end.sample.response_len, end.sample.scores) == (0, {})


@pytest.mark.parametrize(
    ("sharing", "fails"),
    [
        ([1], False),
        ([200, 25], False),
        ([200, 25, 3, 1], False),
        ([200, 25, 3, 1, 1], True),
        ([1, 1], False),
        ([1, 1, 1], True),
    ],
)
def test_a_sample_whose_worker_died_starts_again_until_alone(sharing: list[int], fails: bool) -> None:
    """`sharing`: number of samples in each worker that died."""
    deaths = list(sharing)

    def agent(base_url: str, key: str, prompt: SimpleNamespace) -> Any:
        two_turns(base_url, key, prompt)
        if deaths:
            return SimpleNamespace(kind="died", error="the worker was killed", num_sharing=deaths.pop(0))
        return 1.0

    warnings: list[str] = []
    threads = ThreadWorkers(agent)
    with conversations(NAME, threads, reply, warn=warnings.append) as run:
        run.start(prompt_of(NAME))
        end = run.end()
    expected = {1: [1, 1], 200: [25, 3, 1, 1]}[sharing[0]]
    assert threads.most[1:] == expected[: len(threads.most) - 1]
    assert isinstance(end, Ended) and len(end.sample.sampled) == 2
    assert run.asked[2] == run.asked[0], "the turns are the same, and so are their random streams"
    again = "rollout.agent: samples start again, fewer in a worker, which takes time: the worker was killed"
    assert warnings[0] == again
    if fails:
        assert (end.sample.scores, end.sample.verdicts) == ({"agent": 0.0}, {"agent": "error"})
        assert warnings[1:] == ["rollout.agent failed twice, so its sample scores 0: the worker was killed"]
    else:
        assert (end.sample.scores, warnings[1:]) == ({"agent": 1.0}, [])


def test_an_error_at_the_end_of_a_conversation_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an event the engine would wait for ever."""
    monkeypatch.setattr("grpo_mega.rollout.sessions.session.Session.to_sample", lambda *_: 1 / 0)
    with conversations(NAME, lambda *_: 1.0, reply) as run:
        run.start(prompt_of(NAME))
        end = run.end()
    assert isinstance(end, Failed) and "prompt 7: ZeroDivisionError" in end.error


def test_requests_at_the_same_time_are_sampled_one_after_another() -> None:
    """So limits do not depend on which of them is faster, and equal requests are one turn."""
    running, most_running, problems = set[int](), 0, queue.SimpleQueue[str]()

    def agent(base_url: str, key: str, prompt: SimpleNamespace) -> None:
        def ask(content: str) -> None:
            try:
                post(base_url, key, [user(content)])
            except urllib.error.HTTPError as error:
                problems.put(str(error))

        threads = [threading.Thread(target=ask, args=(content,)) for content in ["a", "b", "a", "c", "b", "c"]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def slowly(request: TurnRequest) -> None:
        nonlocal most_running
        running.add(request.number)
        most_running = max(most_running, len(running))

        def answer() -> None:
            running.discard(request.number)
            run.conversations.answer(request, reply(request))

        threading.Timer(0.1, answer).start()

    with conversations(NAME, agent, slowly) as run:
        run.start(prompt_of(NAME))
        end = run.end()
    assert isinstance(end, Ended) and problems.empty()
    assert (len(run.asked), most_running) == (3, 1)


def test_an_abort_ends_all_conversations_without_an_event() -> None:
    all_asked, ended = threading.Semaphore(0), queue.SimpleQueue[int]()

    def agent(base_url: str, key: str, prompt: SimpleNamespace) -> None:
        try:
            post(base_url, key, prompt.messages)
        except urllib.error.HTTPError as error:
            ended.put(error.code)

    def never(request: TurnRequest) -> TurnResult | None:
        all_asked.release()
        return None if request.prompt.id == 1 else reply(request)

    with conversations(NAME, agent, never) as run:
        for index in range(3):
            run.start(prompt_of(NAME, number=1), index)
        for _ in range(3):
            assert all_asked.acquire(timeout=60)
        run.conversations.abort()
        assert [ended.get(timeout=60) for _ in range(3)] == [410] * 3
        assert run.ends.empty()
        run.start(prompt_of(NAME, number=2))
        end = run.end()
    assert isinstance(end, Ended) and end.sample.prompt.id == 2 and end.sample.num_sampled > 0


def test_an_unusable_template_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    plain = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    strict = "{% if messages[2] %}{{ raise_exception('one turn only') }}{% endif %}" + chat_families.SMOLLM2
    for name, template, problem in [
        ("open", plain, r"ends a turn with no token, so a response ends only if .*; add the model's token"),
        ("strict", strict, r"cannot render a question and its answer \(one turn only\); correct chat_template"),
    ]:
        monkeypatch.setitem(chat_families.FAMILIES, name, Family(template, special))
        with pytest.raises(ConfigError, match=problem), conversations(name, two_turns, reply):
            pass
