"""tools/check_sessions.py passes a sample of its conversations, and fails if sessions do anything wrong."""

from dataclasses import replace
from typing import Any

import pytest

from grpo_mega.rollout.sessions.template import Template, mark
from grpo_mega.types import Sample
from tools.chat_families import FAMILIES
from tools.check_sessions import CheckFailed, Conversation, Machine, check_cost, check_sample, run


def test_generated_conversations_train_exactly_what_was_sampled() -> None:
    totals = run(list(FAMILIES), 135, seed=10**6)
    assert totals["conversations"] == 135 and totals["turns"] > 300
    for name in ("calls", "invalid calls", "extended turns", "repeated requests", "turns with known calls"):
        assert totals[name] > 20, name
    assert totals["segments"] > totals["conversations"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda s: replace(s, sampled=[(start, end + 1) for start, end in s.sampled[:-1]] + s.sampled[-1:]),
            "rows are",
        ),
        (lambda s: replace(s, contexts=s.contexts[:-1]) if s.contexts else replace(s, prompt=_other(s)), "rows are"),
        (lambda s: replace(s, response_ids=[*s.response_ids[:-1], 0]), "rows are"),
        (lambda s: replace(s, rollout_logprobs=[lp or -0.1 for lp in s.rollout_logprobs]), "has a log-prob"),
        (lambda s: replace(s, spans=s.spans[1:]), "spans"),
    ],
)
def test_a_sample_with_any_error_fails_the_check(change: Any, problem: str) -> None:
    conversation = Conversation(Machine("qwen2.5"), seed=52)
    sample = conversation.run()
    assert len(sample.sampled) > 1 and len(sample.segments()) < len(sample.sampled)
    check_sample(sample, conversation.seen)
    with pytest.raises(CheckFailed, match=problem):
        check_sample(change(sample), conversation.seen)


def _other(sample: Sample) -> Any:
    return replace(sample.prompt, token_ids=(*sample.prompt.token_ids, 0))


def test_a_separator_that_is_dropped_or_counted_twice_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Template.extend
    monkeypatch.setattr(Template, "extend", lambda *args: (found := extend(*args)) and found[1:])
    with pytest.raises(CheckFailed, match="the context is not the template's"):
        run(["qwen2.5"], 20, seed=0)
    monkeypatch.setattr(Template, "extend", lambda *args: (found := extend(*args)) and (args[-1], *found))
    with pytest.raises(CheckFailed, match="the context is not the template's"):
        run(["glm4.5-no-thinking"], 20, seed=0)


def test_thoughts_that_are_kept_against_the_template_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    find = Template._find_boundary

    def careless(self: Template, history: Any, suffix: Any, tools: Any) -> Any:
        plain = [
            message | {"content": mark("plain")} if message["role"] == "assistant" else message for message in history
        ]
        return find(self, plain, suffix, tools)

    monkeypatch.setattr(Template, "_find_boundary", careless)
    with pytest.raises(CheckFailed, match="the context is not the template's"):
        run(["qwen3"], 60, seed=0)


def test_a_cost_that_grows_with_the_history_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(characters < 500 for characters, _ in map(check_cost, map(Machine, FAMILIES)))
    extend = Template.extend

    def costly(self: Template, history: Any, *others: Any) -> Any:
        self.counts["rendered"] += len(history)
        return extend(self, history, *others)

    monkeypatch.setattr(Template, "extend", costly)
    with pytest.raises(CheckFailed, match=r"qwen2\.5: the cost of a turn depends on the turns before"):
        check_cost(Machine("qwen2.5"))
