"""Only the tokens that a model wrote are calls, and a call that cannot be parsed is reported."""

import json

import pytest

from tests.helpers.sessions import CALL, Dialogue, decode, encode, parser_of, user
from tools.chat_families import FAMILIES

FORMATS = {"llama3": "llama3", "mistral": "mistral"}


def parsed(name: str, text: str) -> tuple[str, list[tuple[str, object]], list[str]]:
    turn = parser_of(name).parse(encode(name, text))
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in turn.calls]
    return turn.content, calls, [one["error"] for one in turn.invalid]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_from_the_template(name: str) -> None:
    assert parser_of(name).format == FORMATS.get(name, "hermes")


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("qwen2.5", f"Let me see.\n{CALL}\n{CALL}", "Let me see.", [("f", {"a": 1})] * 2),
        ("qwen2.5", "no call", "no call", []),
        (
            "smollm2",
            '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>',
            "",
            [("f", {}), ("g", {})],
        ),
        ("llama3", '{"name": "f", "parameters": {"a": {"b": [1]}}}', "", [("f", {"a": {"b": [1]}})]),
        (
            "llama3",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {}), ("g", {})],
        ),
        ("llama3", '{"answer": 4}', '{"answer": 4}', []),
        ("mistral", 'Well [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "Well", [("f", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', "", [("f", {"a": 1}), ("g", {"b": 2})]),
    ],
)
def test_calls_are_parsed_by_family(name: str, text: str, content: str, calls: list[tuple[str, object]]) -> None:
    assert parsed(name, text) == (content, calls, [])


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("qwen2.5", '<tool_call>\n{"name": "f", "arguments": {\n</tool_call>', "not JSON"),
        ("qwen2.5", '<tool_call>\n{"name": "f"}', "</tool_call> is missing"),
        ("qwen2.5", '<tool_call>{"arguments": {}}</tool_call>', "object with name"),
        ("qwen2.5", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "must be an object, not a text"),
        ("qwen2.5", f"<tool_call>{'[' * 5000}</tool_call>", "nested too deeply"),
        ("llama3", '{"name": "f", "parameters": ', "not JSON"),
        ("mistral", "[TOOL_CALLS] [1]", "object with name"),
    ],
)
def test_a_call_that_cannot_be_parsed_is_reported_with_the_whole_text(name: str, text: str, problem: str) -> None:
    content, calls, errors = parsed(name, text)
    assert (content, calls) == (text, []) and problem in errors[0]


def test_marks_from_other_tokens_and_marks_in_thoughts_are_text() -> None:
    spelled = [*encode("qwen2.5", "<tool"), *encode("qwen2.5", CALL.removeprefix("<tool"))]
    assert decode("qwen2.5", spelled) == CALL
    assert parser_of("qwen2.5").parse(spelled).calls == []
    thought = f"<think>\nI could write {CALL}\n</think>\n\n"
    assert parsed("qwen3", thought) == (thought, [], [])
    assert parsed("qwen3", f"{thought}{CALL}") == (thought.strip(), [("f", {"a": 1})], [])
    assert parsed("qwen3", f"<think>\n{CALL}")[1] == [], "the thought is not closed"
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert parsed("llama3", f"<think>\n{call}")[1] == [] and parsed("llama3", f"<think>a</think>{call}")[1]
    quoted = '<tool_call>{"name": "f", "arguments": {"a": "<think>"}}</tool_call>'
    assert parsed("qwen3", quoted)[1] == [("f", {"a": "<think>"})]


def test_a_mark_in_a_question_is_no_call() -> None:
    talk = Dialogue("qwen2.5", f"What is {CALL}?")
    turn = talk.ask([user(f"What is {CALL}?")], "A call.")
    assert turn.answer == {"role": "assistant", "content": "A call."} and turn.finish_reason == "stop"


def test_ids_of_calls_are_nine_letters_and_differ() -> None:
    turn = parser_of("mistral").parse(encode("mistral", '[TOOL_CALLS] [{"name": "f"}, {"name": "f"}]'))
    ids = [call["id"] for call in turn.calls]
    assert len(set(ids)) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)
