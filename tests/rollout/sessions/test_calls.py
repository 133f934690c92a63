"""Only the tokens that a model wrote are calls, and a call that cannot be parsed is reported."""

import json
from typing import Any

import pytest

from tests.helpers.sessions import CALL, Dialogue, decode, encode, parser_of, user
from tools.chat_families import FAMILIES

GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
GLM += "<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>"
QWEN = "<tool_call>\n<function=f>\n<parameter=a>\n[1]\n</parameter>\n"
QWEN += "<parameter=b>\nx\ny\n</parameter>\n</function>\n</tool_call>"
FORMATS = {"llama3": "llama3", "mistral": "mistral"}
FORMATS |= {name: "qwen3_coder" for name in FAMILIES if name.startswith("qwen3.5")}
FORMATS |= {name: "glm45" for name in FAMILIES if name.startswith("glm")}


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
        ("glm4.5", f"Well\n{GLM}\n{GLM}", "Well", [("f", {"a": 1, "b": "x y"})] * 2),
        ("glm4.5", "<tool_call>f\n</tool_call>", "", [("f", {})]),
        ("qwen3.5", f"</think>\n\nWell\n\n{QWEN}\n{QWEN}", "</think>\n\nWell", [("f", {"a": [1], "b": "x\ny"})] * 2),
        ("qwen3.5", "</think><tool_call><function=f></function></tool_call>", "</think>", [("f", {})]),
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
        ("qwen2.5", f"<tool_call>{'[' * 20_000}</tool_call>", "nested too deeply"),
        ("llama3", '{"name": "f", "parameters": ', "not JSON"),
        ("llama3", "so<|python_tag|>", "object with name"),
        ("llama3", '<|python_tag|>[{"name": "f", "parameters": {}}]', "object with name"),
        ("mistral", "[TOOL_CALLS] [1]", "object with name"),
        ("glm4.5", f"{GLM.removesuffix('</tool_call>')}", "</tool_call> is missing"),
        ("glm4.5", "<tool_call>\n</tool_call>", "name of the function is missing"),
        ("glm4.5", CALL, "name of the function is missing"),
        ("glm4.5", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", "'<arg_key>a</arg_key>' is not an argument"),
        ("qwen3.5", "</think><tool_call><function=f><parameter=a>1</function></tool_call>", "not an argument or </fun"),
        ("qwen3.5", f"</think>{CALL}", "name of the function is missing"),
    ],
)
def test_a_call_that_cannot_be_parsed_is_reported_with_the_whole_text(name: str, text: str, problem: str) -> None:
    content, calls, errors = parsed(name, text)
    assert (content, calls) == (text, []) and problem in errors[0]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "  x ", "  x "),
        ({"type": "string"}, '"x"', '"x"'),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "1", "1"),
        ({}, '{"k": [1]}', {"k": [1]}),
        (None, "1.5", 1.5),
        (None, "NaN", "NaN"),
        (3, "1", 1),
    ],
)
@pytest.mark.parametrize("name", ["glm4.5", "qwen3.5-no-thinking"])
def test_the_schema_of_a_tool_decides_which_arguments_in_xml_are_texts(
    name: str, schema: Any, text: str, value: Any
) -> None:
    parser = parser_of(name)
    tools = [{"function": {"name": "g"}}, {"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    form = {"glm45": "f <arg_key>a</arg_key><arg_value>{}</arg_value>"}
    call = form.get(parser.format, "<function=f><parameter=a>\n{}\n</parameter></function>").format(text)
    [found] = parser.parse(encode(name, f"<tool_call>{call}</tool_call>"), tools).calls
    assert json.loads(found["function"]["arguments"]) == {"a": value}


def test_an_argument_that_never_ends_is_read_in_linear_time() -> None:
    """A pattern with nested repetition would need years."""
    pair = "<arg_key>a</arg_key><arg_value>1</arg_value>"
    assert "not an argument" in parsed("glm4.5", f"<tool_call>f{pair * 2000}<arg_key></tool_call>")[2][0]


@pytest.mark.parametrize("tool_format", ["hermes", "glm45", "qwen3_coder", "mistral"])
def test_a_call_is_written_as_it_is_read(tool_format: str) -> None:
    """SmolLM2's template does not render calls."""
    parser = parser_of("smollm2", tool_format)
    function = {"name": "f", "arguments": {"a": [1, {"b": None}], "c": "x\ny", "d": "\u2028 "}}
    text = parser.written({"role": "assistant", "content": "so ", "tool_calls": [{"function": function}] * 2})
    turn = parser.parse(encode("smollm2", text))
    assert turn.content == "so" and not turn.invalid
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in turn.calls]
    assert found == [(function["name"], function["arguments"])] * 2


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
