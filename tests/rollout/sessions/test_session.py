"""A session reuses the tokens that were sampled, and trains nothing else."""

import json
from dataclasses import replace
from typing import Any

import pytest

from grpo_mega.rollout.sessions.session import ChatRequest
from grpo_mega.rollout.sessions.template import RequestError
from grpo_mega.types import Context
from tests.helpers.sessions import CALL, TOOLS, Dialogue, decode, encode, result_of, tool, user
from tools.chat_families import FAMILIES, stop_ids, tokenizer_of

THOUGHT = "<think>\nit is 4\n</think>\n\n4"
# Templates that keep the whole history when another question follows a plain answer.
KEEPS = ("llama3", "mistral", "qwen2.5", "qwen3", "qwen3-2507", "glm4.5-no-thinking", "smollm2")


def test_a_second_turn_extends_the_tokens_of_the_first() -> None:
    talk = Dialogue("qwen2.5")
    first = talk.ask([user("hello")], "4")
    second = talk.ask([user("hello"), first.answer, user("sure?")], "yes")
    assert first.request.context_ids == talk.prompt.token_ids
    assert second.request.context_ids[: len(first.all_ids)] == first.all_ids
    inserted = decode("qwen2.5", second.request.context_ids[len(first.all_ids) :])
    assert inserted == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    sample = talk.session.to_sample("stop")
    assert [*sample.prompt.token_ids, *sample.response_ids] == [*second.all_ids]
    assert sample.sampled == [(0, 2), (sample.response_len - 3, sample.response_len)]
    assert sample.rollout_logprobs == [-0.5] * 2 + [0.0] * (sample.response_len - 5) + [-0.5] * 3
    assert (sample.contexts, sample.step_ends, sample.index) == ([], [], 2)
    assert sample.messages is not None and [m["content"] for m in sample.messages] == ["hello", "4", "sure?", "yes"]


def test_sampled_tokens_are_kept_even_if_the_tokenizer_would_choose_others() -> None:
    talk, ids = Dialogue("qwen2.5"), [*encode("qwen2.5", "hel"), *encode("qwen2.5", "lo")]
    assert ids != encode("qwen2.5", "hello")
    chat = ChatRequest.read([user("hello")])
    first, result = talk.session.turn_of(chat), result_of("qwen2.5", "hello")
    result.token_ids[:-1] = ids
    talk.session.record(first, chat, result)
    second = talk.turn([user("hello"), {"role": "assistant", "content": "hello"}, user("more")])
    start = len(talk.prompt.token_ids)
    assert list(second.request.context_ids[start : start + len(ids)]) == ids


@pytest.mark.parametrize("name", FAMILIES)
def test_the_separator_is_the_templates(name: str) -> None:
    """It follows the stop token, so it also has the line break that some templates write after it."""
    talk = Dialogue(name)
    first = talk.ask([user("hello")], "4")
    messages = [user("hello"), first.answer, user("sure?")]
    second = talk.turn(messages)
    whole = tokenizer_of(name).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    text = decode(name, second.request.context_ids)
    assert "".join(text.split()) == "".join(whole.split())
    assert (second.parent is first) == (name in KEEPS)


def test_a_thought_that_the_template_removes_starts_a_new_segment() -> None:
    talk = Dialogue("qwen3")
    first = talk.ask([user("hello")], THOUGHT)
    second = talk.ask([user("hello"), first.answer, user("sure?")], "yes")
    assert second.parent is None
    assert "think" not in decode("qwen3", second.request.context_ids)
    sample = talk.session.to_sample("stop")
    assert sample.response_ids == [*first.token_ids, *second.token_ids]
    assert sample.contexts == [Context(len(first.token_ids), second.request.context_ids)]
    assert [(s.context_ids, s.start) for s in sample.segments()] == [
        (talk.prompt.token_ids, 0),
        (second.request.context_ids, len(first.token_ids)),
    ]


def test_a_thought_before_a_call_stays_while_tools_answer() -> None:
    talk = Dialogue("qwen3")
    first = talk.ask([user("hello")], f"<think>\nI call f\n</think>\n\n{CALL}", tools=TOOLS)
    second = talk.ask([user("hello"), first.answer, tool("2")], "2", tools=TOOLS)
    assert first.finish_reason == "tool_calls" and second.parent is first
    third = talk.ask([user("hello"), first.answer, tool("2"), second.answer, user("sure?")], "yes", tools=TOOLS)
    assert third.parent is None, "the template removes the thought when a question follows"


def test_calls_stay_in_the_history_if_the_template_does_not_render_them() -> None:
    talk = Dialogue("smollm2")
    first = talk.ask([user("hello")], f"Let me see. {CALL}", tools=TOOLS)
    assert first.answer["tool_calls"] and not talk.template.shows_calls
    second = talk.ask([user("hello"), first.answer, tool("2")], "2", tools=TOOLS)
    assert second.parent is first
    changed = talk.turn(
        [{"role": "system", "content": "be brief"}, user("hello"), first.answer, tool("2")], tools=TOOLS
    )
    assert changed.parent is None
    assert '"name": "f"' in decode("smollm2", changed.request.context_ids)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m | {"content": m["content"] or ""},
        lambda m: m | {"content": "  \n"},
        lambda m: {k: v for k, v in m.items() if k != "content"},
        lambda m: m | {"refusal": None, "audio": None, "annotations": [], "function_call": None},
        lambda m: m | {"tool_calls": [_reordered(m["tool_calls"][0])]},
        lambda m: m | {"tool_calls": [m["tool_calls"][0] | {"id": "another"}]},
        lambda m: dict(reversed(m.items())),
    ],
)
def test_messages_are_equal_if_their_content_is(change: Any) -> None:
    talk = Dialogue("qwen2.5")
    body = '<tool_call>\n{"name": "f", "arguments": {"a": 1.0, "b": {"c": "x", "d": 2}}}\n</tool_call>'
    first = talk.ask([user("hello")], body, tools=TOOLS)
    assert talk.turn([user("hello"), change(first.answer), tool("2")], tools=TOOLS).parent is first


def _reordered(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"function": {"arguments": {"b": {"d": 2, "c": "x"}, "a": 1}, "name": "f"}}


def test_messages_with_other_content_start_a_segment() -> None:
    talk = Dialogue("qwen2.5")
    first = talk.ask([user("hello")], CALL, tools=TOOLS)
    call = first.answer["tool_calls"][0]
    other = call | {"function": {"name": "f", "arguments": '{"a": 2}'}}
    assert talk.turn([user("hello"), first.answer | {"tool_calls": [other]}, tool("2")], tools=TOOLS).parent is None
    assert talk.turn([user("other"), first.answer, tool("2")], tools=TOOLS).parent is None
    assert talk.turn([user("hello"), first.answer, tool("2")], tools=None).parent is None


def test_a_repeated_request_gets_the_stored_answer() -> None:
    talk = Dialogue("qwen2.5", max_turns=1)
    first = talk.ask([user("hello")], "4")
    assert talk.turn([user("hello  ")]) is first
    assert talk.turn([{"role": "user", "content": [{"type": "text", "text": "hello"}]}]) is first
    with pytest.raises(RequestError, match=r"has reached rollout\.max_turns"):
        talk.turn([user("hello")], max_tokens=5)
    assert talk.session.to_sample("turns").num_sampled == 2


def test_equal_requests_with_other_limits_train_their_tokens_once() -> None:
    """A turn's random stream depends on its context, so each answer starts like the longest."""
    talk, z = Dialogue("qwen2.5"), frozenset(encode("qwen2.5", "z"))
    for text, stop, options in [
        ("xy", None, {"max_tokens": 2}), ("xyzw", 0, {}), ("xyzw", 0, {"max_tokens": 50}),
        ("xyz", None, {"max_tokens": 9, "stop_ids": z}), ("q", None, {"max_tokens": 4}),
    ]:  # fmt: skip
        talk.ask([user("hello")], text, stop=stop, **options)
    last = talk.ask([user("hello"), talk.session.turns[1].answer, user("sure?")], "yes")
    for number, turn in enumerate(talk.session.turns):
        turn.reward = 2.0**number if number != 3 else None
    sample = talk.session.to_sample("stop")
    rows = [(*s.context_ids, *sample.response_ids[s.start : s.end]) for s in sample.segments()]
    whole, other = talk.session.turns[2], talk.session.turns[4]
    assert rows == [last.all_ids, other.all_ids]
    assert sample.num_sampled == sum(len(turn.token_ids) for turn in (whole, last, other))
    assert sample.step_rewards == [1.0 + 2.0 + 4.0, 32.0, 16.0]


def test_answers_that_only_start_alike_are_all_trained() -> None:
    """Servers round differently in batches of other sizes."""
    talk = Dialogue("qwen2.5")
    turns = [talk.ask([user("hello")], text, max_tokens=most) for text, most in (("abc", 9), ("abd", 8), ("a", 7))]
    assert talk.session.to_sample("stop").num_sampled == sum(len(turn.token_ids) for turn in turns)


@pytest.mark.parametrize("limit", [{"max_response_length": 3}, {}])
def test_a_turn_that_ended_by_length_is_not_extended(limit: dict[str, int]) -> None:
    talk = Dialogue("qwen2.5", **limit)
    chat = ChatRequest.read([user("hello")], max_tokens=3)
    first = talk.session.turn_of(chat)
    assert first.request.max_new_tokens == 3
    talk.session.record(first, chat, result_of("qwen2.5", "xyz", stop=None))
    assert (first.finish_reason, talk.session.reached_limit) == ("length", "length" if limit else None)
    more = [user("hello"), first.answer, user("go on")]
    if limit:
        with pytest.raises(RequestError, match=r"max_response_length") as caught:
            talk.turn(more)
        assert caught.value.code == "max_response_length"
    else:
        assert talk.turn(more).parent is None


def test_a_turn_cut_at_a_stop_token_is_not_extended() -> None:
    talk, chat = Dialogue("qwen2.5"), ChatRequest.read([user("hello")], max_tokens=2)
    turn = talk.session.turn_of(chat)
    talk.session.record(turn, chat, replace(result_of("qwen2.5", "4"), finish_reason="length"))
    assert talk.turn([user("hello"), {"role": "assistant", "content": "4"}, user("more")]).parent is None


def test_the_opener_of_the_next_turn_is_counted_once() -> None:
    """GLM's stop tokens open the next turn."""
    talk = Dialogue("glm4.5-no-thinking")
    first = talk.ask([user("hello")], "\n4", stop=0)
    second = talk.ask([user("hello"), first.answer, user("sure?")], "\nyes", stop=0)
    assert second.parent is first
    assert decode("glm4.5-no-thinking", second.request.context_ids).count("<|user|>") == 2
    other = Dialogue("glm4.5-no-thinking")
    first = other.ask([user("hello")], "\n4", stop=1)
    assert other.turn([user("hello"), first.answer, user("sure?")]).parent is None, "<|observation|> opens no question"


def test_the_opener_of_a_tools_result_is_counted_once() -> None:
    """GLM's calls end with <|observation|>, which opens the results."""
    talk = Dialogue("glm4.5-no-thinking")
    call = "\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    first = talk.ask([user("hello")], call, stop=1, tools=TOOLS)
    second = talk.ask([user("hello"), first.answer, tool("2")], "\n2", stop=0, tools=TOOLS)
    assert first.finish_reason == "tool_calls" and second.parent is first
    row = decode("glm4.5-no-thinking", second.all_ids)
    assert row.count("<|observation|>") == 1 and "</tool_call><|observation|>\n<tool_response>\n2\n</tool_resp" in row
    sample = talk.session.to_sample("stop")
    assert sample.sampled[0][1] == len(first.token_ids) and sample.rollout_logprobs[sample.sampled[0][1] - 1] == -0.5


def test_another_stop_token_than_the_templates_starts_a_segment() -> None:
    talk = Dialogue("qwen2.5")
    first = talk.ask([user("hello")], "4", stop=1)
    assert talk.turn([user("hello"), first.answer, user("sure?")]).parent is None
    extra = encode("qwen2.5", "x")[0]
    chat = ChatRequest.read([user("a")], stop_ids=frozenset({extra}))
    turn = talk.session.turn_of(chat)
    assert turn.request.stop_token_ids == {extra, *stop_ids("qwen2.5")}


def test_branches_become_rows_with_their_common_part_as_context() -> None:
    talk = Dialogue("qwen2.5")
    first = talk.ask([user("hello")], "4")
    one = talk.ask([user("hello"), first.answer, user("why?")], "so")
    other = talk.ask([user("hello"), first.answer, user("how?")], "thus")
    last = talk.ask([user("hello"), first.answer, user("why?"), one.answer, user("oh")], "yes")
    one.reward, last.reward = 1.0, 0.5
    sample = talk.session.to_sample("stop")
    rows = [(*s.context_ids, *sample.response_ids[s.start : s.end]) for s in sample.segments()]
    assert rows == [last.all_ids, other.all_ids]
    assert sample.num_sampled == sum(len(turn.token_ids) for turn in (first, one, other, last))
    assert sample.step_rewards == [0.0, 1.0, 0.5, 0.0]
    assert [sample.response_ids[end] for end in sample.step_ends] == [stop_ids("qwen2.5")[0]] * 4


def test_a_changed_prompt_is_the_context_of_the_first_turn() -> None:
    talk = Dialogue("qwen2.5")
    first = talk.ask([{"role": "system", "content": "be brief"}, user("hello")], "4", tools=TOOLS)
    sample = talk.session.to_sample("stop")
    assert sample.contexts == [Context(0, first.request.context_ids)]
    assert "be brief" in decode("qwen2.5", sample.contexts[0].token_ids)


def test_inserted_tokens_count_towards_the_length_of_a_response() -> None:
    talk = Dialogue("qwen2.5", max_response_length=60)
    first = talk.ask([user("hello")], "4")
    second = talk.turn([user("hello"), first.answer, user("sure?")])
    assert second.request.max_new_tokens == 60 - 2 - (len(second.request.context_ids) - len(first.all_ids))
    with pytest.raises(RequestError, match="max_response_length"):
        talk.turn([user("hello"), first.answer, user("y" * 100)])
    assert talk.session.reached_limit == "length"
    assert talk.session.to_sample("length").response_len == 2


def test_a_context_beyond_the_engines_length_is_refused() -> None:
    talk = Dialogue("qwen2.5", max_context=200)
    with pytest.raises(RequestError, match="max_response_length"):
        talk.turn([user("y" * 300)])


def test_calls_of_the_last_possible_turn_end_the_sample_by_its_limit() -> None:
    talk = Dialogue("qwen2.5", max_turns=1)
    talk.ask([user("hello")], CALL, tools=TOOLS)
    assert talk.session.reached_limit == "turns"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "must be a list of at least one message"),
        ([{"role": "user"}, {"role": "assistant", "content": "a"}], "must not end with an assistant message"),
        ([{"role": "robot", "content": "a"}], r"messages\[0\]: must be an object with a role"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\]\.content\[0\]=.*: must be {\"type\": \"text\"",
        ),
        ([{"role": "user", "content": "a", "tool_calls": [{}]}], r"messages\[0\]\.tool_calls: must be a list in an"),
    ],
)
def test_messages_of_another_form_are_refused(messages: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        ChatRequest.read(messages)


def test_calls_and_parts_of_any_client_are_one_form() -> None:
    parts = [{"type": "text", "text": "hel", "annotations": None}, {"type": "text", "text": "lo"}]
    talk = Dialogue("qwen2.5")
    first = talk.ask([user("hello")], CALL, tools=TOOLS)
    (call,) = first.answer["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    reply = {"role": "tool", "content": "4", "tool_call_id": call["id"], "name": call["function"]["name"]}
    turns = []
    for given in (arguments, json.dumps(arguments, indent=3)):
        answer = {"role": "assistant", "tool_calls": [call | {"function": call["function"] | {"arguments": given}}]}
        turns.append(talk.turn([user("") | {"content": parts}, answer, reply], tools=TOOLS))
    assert turns[0] is turns[1] and turns[0].parent is first


@pytest.mark.parametrize("later", [False, True])
def test_what_the_template_does_not_show_of_a_message_is_refused(later: bool) -> None:
    talk, named = Dialogue("qwen2.5"), user("why?") | {"name": "Zoe"}
    before = [user("hello"), talk.ask([user("hello")], "4").answer] if later else []
    with pytest.raises(RequestError, match=rf"leaves out name of message {len(before)} \(role 'user'\): 'Zoe'"):
        talk.turn([*before, named])


def test_arguments_that_are_nested_too_deeply_stay_a_text() -> None:
    talk, deep = Dialogue("qwen2.5"), '{"a": ' + "[" * 700 + "]" * 700 + "}"
    answer = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    turn = talk.turn([user("hello"), answer, user("more")])
    assert "[[[" in decode("qwen2.5", turn.request.context_ids)


def test_surrogates_and_line_separators_are_rendered() -> None:
    talk = Dialogue("qwen2.5")
    first = talk.ask([user("hello")], "4")
    second = talk.turn([user("hello"), first.answer, user("a\ud800b\u2028c\u0085")])
    assert decode("qwen2.5", second.request.context_ids).count("a\ufffdb\u2028c\u0085") == 1


def test_a_conversation_without_a_turn_is_an_empty_sample() -> None:
    sample = Dialogue("qwen2.5").session.to_sample("stop")
    assert (sample.response_len, sample.num_sampled, sample.first_version, sample.messages) == (0, 0, 1, [])
