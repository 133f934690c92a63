"""Calls, thoughts, tools and names in a chat row reach the model, otherwise the row is refused."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_mega.config import DataConfig
from grpo_mega.data.chat import Demonstration, Renderer, load_demonstrations
from grpo_mega.data.load import load_prompts
from grpo_mega.data.rows import read_demonstrations
from grpo_mega.errors import ConfigError
from grpo_mega.rollout.sessions.template import Template, clean
from grpo_mega.types import Prompt
from tests.data.test_dataset import make_tokenizer
from tools.chat_families import FAMILIES, stop_ids, tokenizer_of

WITH_TOOLS = [name for name in FAMILIES if name != "smollm2"]
TEXT = '{"city": "Oslo \u2028é", "days": 3, "exact": true, "unit": null, "more": {"type": "t", "id": [1, "{}"]}}'
VALUES = {"city": "Oslo \u2028é", "days": 3, "exact": True, "unit": None, "more": {"type": "t", "id": [1, "{}"]}}
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
END = "{% endfor %}<end>"


def tool(name: str, *arguments: str, **extra: Any) -> dict[str, Any]:
    properties = {one: {"type": "string", "description": f"the {one}"} for one in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    function = {"name": name, "description": f"Find the {name}.", "parameters": parameters}
    return {"type": "function", "function": function | extra}


TOOLS = [tool("weather", "city"), tool("tides", "harbour", "day")]


def chat(arguments: Any, **call: Any) -> list[dict[str, Any]]:
    """Return a chat in OpenAI's form."""
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "callabc01", "type": "function", "function": function} | call]
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "callabc01", "content": [{"type": "text", "text": '{"rain": 3}'}]},
        {"role": "assistant", "content": "It rains."},
    ]


def changed(*path: Any, **keys: Any) -> list[dict[str, Any]]:
    """Return the chat with more keys in the dictionary at the path."""
    messages = chat(TEXT)
    inner: Any = messages
    for step in path:
        inner = inner[step]
    inner.update(keys)
    return messages


def write(folder: Path, *rows: dict[str, Any]) -> DataConfig:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config_of(folder / "rows.jsonl")


def config_of(path: Path) -> DataConfig:
    return DataConfig.model_validate({"train": str(path), "max_length": 9999, "max_prompt_length": 9999})


def demonstrate(config: DataConfig, family: str) -> list[Demonstration]:
    tokenizer = tokenizer_of(family)
    return load_demonstrations(config.train[0], config, tokenizer, stop_ids=stop_ids(family))[0]


def prompts_of(config: DataConfig, family: str, **options: Any) -> list[Prompt]:
    return load_prompts(config.train[0], config, tokenizer_of(family), **options)[0]


def refusal(config: DataConfig, family: str = "qwen2.5") -> str:
    with pytest.raises(ConfigError) as caught:
        demonstrate(config, family)
    assert str(caught.value).startswith(f"{config.train[0].path}:1: ") and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_openais_form_is_trained_as_the_template_writes_values(tmp_path: Path, family: str) -> None:
    rows = [{"messages": chat(one), "tools": TOOLS} for one in (TEXT, VALUES)]
    config = write(tmp_path, *rows)
    first, second = demonstrate(config, family)
    assert first.segments == second.segments and "Find the tides." in first.text
    values = chat(VALUES)
    values[1] = {key: values[1][key] for key in ("role", "tool_calls")} | {"content": ""}
    values[2]["content"] = '{"rain": 3}'
    options = {"tools": TOOLS, "tokenize": False, "add_generation_prompt": True}
    prompt = tokenizer_of(family).apply_chat_template(values[:3], **options)
    assert first.text == prompt
    tokens = Template(tokenizer_of(family), stop_ids(family)).render([clean(m, "m") for m in chat(TEXT)[:3]], TOOLS)
    assert list(tokens) == tokenizer_of(family)(prompt, add_special_tokens=False)["input_ids"]
    (row,) = prompts_of(write(tmp_path, {"prompt": chat(TEXT)[:3], "answer": "1", "tools": TOOLS}), family)
    assert row.text == prompt and row.extras == {"tools": TOOLS}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (changed(0, name="Zoe"), "name of message 0 (role 'user'): 'Zoe'"),
        (changed(1, weight=0), "weight of message 1 (role 'assistant'): 0"),
        (changed(1, audio={"id": "a1"}), "audio.id of message 1 (role 'assistant'): 'a1'"),
        (changed(1, refusal="No."), "refusal of message 1 (role 'assistant'): 'No.'"),
        (changed(1, function_call={"name": "f", "arguments": "{}"}), "function_call.name of message 1"),
        (changed(1, "tool_calls", 0, note="n"), "tool_calls[0].note of message 1 (role 'assistant'): 'n'"),
        (changed(1, "tool_calls", 0, "function", strict=True), "tool_calls[0].function.strict of message 1"),
        (changed(2, name="other"), "name of message 2 (role 'tool'): 'other'"),
        (changed(3, citations=[{"url": "u"}]), "citations[0].url of message 3 (role 'assistant'): 'u'"),
    ],
    ids=lambda value: value.partition(" ")[0] if isinstance(value, str) else "",
)
def test_what_the_template_does_not_show_is_refused_with_its_field(
    tmp_path: Path, messages: list[dict[str, Any]], field: str
) -> None:
    assert f"leaves out {field}" in refusal(write(tmp_path, {"messages": messages}))


def test_ids_types_and_names_of_called_tools_carry_no_text(tmp_path: Path) -> None:
    plain = demonstrate(write(tmp_path, {"messages": chat(TEXT)}), "qwen2.5")[0]
    messages = changed(2, name="weather", id="m1", index=2)
    messages[1] |= {"id": "m0", "type": "message", "index": 1, "name": None, "function_call": None}
    messages[1]["tool_calls"][0]["index"] = 0
    assert demonstrate(write(tmp_path, {"messages": messages}), "qwen2.5")[0].segments == plain.segments


@pytest.mark.parametrize("leaf", ["city", "days", "exact", "more.type", "more.id", "name"])
def test_a_template_that_omits_a_part_of_a_call_is_refused(leaf: str) -> None:
    (outer, *inner), call = leaf.split("."), '{{ c.function.name }}{% set a = c.function["arguments"] %}'
    items = f"{{% for k, v in a.items() if k != '{outer}' %}}{{{{ k }}}}{{{{ v }}}}{{% endfor %}}"
    if inner:
        items += f"{{% for k, v in a.more.items() if k != '{inner[0]}' %}}{{{{ k }}}}{{{{ v }}}}{{% endfor %}}"
    call = call.replace("{{ c.function.name }}", "") if leaf == "name" else call
    template = PLAIN + "{% for c in m.tool_calls or [] %}" + call + items + "{% endfor %}" + END
    with pytest.raises(ConfigError, match=r"^a:1: .*tool_calls\[0\]\.function\.\S*" + leaf):
        Renderer(make_tokenizer(template)).render([clean(m, "m") for m in chat(TEXT)[:3]], "a:1")


def test_only_the_first_of_two_calls_is_not_enough(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PLAIN + CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]") + END)
    tokenizer.eos_token = "<end>"
    messages = chat(TEXT)[:2]
    messages[1]["tool_calls"] *= 2
    config = write(tmp_path, {"messages": messages})
    with pytest.raises(ConfigError, match=r"tool_calls\[1\]\.function\.name .*message 1"):
        load_demonstrations(config.train[0], config, tokenizer, stop_ids=())


def test_a_template_may_take_arguments_as_json_text_only() -> None:
    """As DeepSeek V3's template does."""
    template = PLAIN + CALLS.replace("c.function.arguments | tojson", "'=' + c.function.arguments") + END
    text = Renderer(make_tokenizer(template)).render([clean(m, "m") for m in chat('{"a":1,"é":null}')[:3]], "a:1")
    assert '[weather={"a": 1, "é": null}]' in text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_trained_under_each_of_its_names(tmp_path: Path, name: str) -> None:
    messages = changed(1, **{name: "Ask the tool."})
    messages[3] |= {name: "It is 3."}
    answers = {family: demonstrate(write(tmp_path, {"messages": messages}), family)[0].answer for family in _THINKING}
    assert all("Ask the tool." in answer and "It is 3." in answer for answer in answers.values())
    assert "chat template changes" in refusal(write(tmp_path, {"messages": messages}))
    given = prompts_of(write(tmp_path, {"prompt": messages[:3], "answer": "1"}), "qwen2.5")[0]
    assert "Ask the tool." not in given.text and '"Oslo' in given.text


_THINKING = ("qwen3", "qwen3.5", "glm4.5")


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (chat('{"city": '), "messages[1].tool_calls[0].function.arguments='{\"city\": ' is not a JSON object"),
        (chat("[1]"), "function.arguments=[1] is not a JSON object"),
        (chat('"{}"'), "function.arguments='{}' is not a JSON object"),
        (chat(3), "function.arguments=3 is not a JSON object"),
        (chat('{"a": NaN}'), "function.arguments={'a': nan} is not a JSON object"),
        (chat('{"a": "\\ud800"}'), "function.arguments={'a': '\\ud800'} is not a JSON object"),
        (changed(1, "tool_calls", 0, function={"arguments": "{}"}), "messages[1].tool_calls[0]: must be a call with"),
        (changed(1, tool_calls="no JSON"), "messages[1].tool_calls: must be a list in an assistant message"),
        (changed(0, tool_calls=[{}]), "messages[0].tool_calls: must be a list in an assistant message"),
        (changed(1, thinking={"a": 1}), "messages[1].thinking={'a': 1}: must be the one text"),
        (changed(1, thinking="a", reasoning="b"), "messages[1].thinking='a': must be the one text"),
        (changed(0, reasoning="a"), "messages[0].reasoning='a': must be the one text of an assistant's thought"),
    ],
    ids=lambda value: value[-40:] if isinstance(value, str) else "",
)
def test_a_message_of_another_form_is_refused_with_its_field(
    tmp_path: Path, messages: list[dict[str, Any]], problem: str
) -> None:
    assert problem in refusal(write(tmp_path, {"messages": messages}))


def test_empty_texts_of_thoughts_calls_and_tools_stand_for_none(tmp_path: Path) -> None:
    empty = {"reasoning_content": "", "thinking": "", "tool_calls": "[]"}
    rows = [{"role": "user", "content": "Tides?"} | empty, {"role": "assistant", "content": "High."} | empty]
    (plain,) = demonstrate(write(tmp_path, {"messages": [one | dict.fromkeys(empty) for one in rows]}), "qwen2.5")
    for tools in ("null", "[]", "{}"):
        (row,) = demonstrate(write(tmp_path, {"messages": rows, "tools": tools}), "qwen2.5")
        assert (row.text, row.answer) == (plain.text, plain.answer) and "High." in row.answer


@pytest.mark.parametrize("empty", ["", None, {}, "{}"], ids=repr)
def test_a_call_without_arguments_has_an_empty_object(tmp_path: Path, empty: Any) -> None:
    (row,) = demonstrate(write(tmp_path, {"messages": chat(empty)}), "qwen2.5")
    assert '{"name": "weather", "arguments": {}}' in row.answer


def test_calls_without_a_wrapper_and_as_json_text_are_equal(tmp_path: Path) -> None:
    bare = chat(TEXT)
    bare[1]["tool_calls"] = [{"name": "weather", "arguments": TEXT}]
    text = chat(TEXT)
    text[1]["tool_calls"] = json.dumps(text[1]["tool_calls"])
    found = demonstrate(write(tmp_path, *({"messages": one} for one in (chat(TEXT), bare, text))), "qwen2.5")
    assert found[0].segments == found[1].segments == found[2].segments


def test_nulls_of_columns_are_absent_at_every_depth(tmp_path: Path) -> None:
    """Arrow gives each struct of a column the keys of all of them."""
    calls = [
        [{"id": "c1", "function": {"name": name, "arguments": arguments}, "type": "function"}]
        for name, arguments in (("weather", {"city": "Oslo", "in": {"a": 1}}), ("tides", {"in": {"b": [3]}, "day": 2}))
    ]
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": one}]}
        | {"tools": [tool("weather", "city"), tool("tides", "day", strict=True)]}
        for one in calls
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = config_of(tmp_path / "rows.parquet")
    stored = parquet.read_table(tmp_path / "rows.parquet").to_pylist()[0]
    assert None in stored["messages"][1]["tool_calls"][0]["function"]["arguments"].values()
    assert demonstrate(config, "qwen2.5") == demonstrate(write(tmp_path, *rows), "qwen2.5")
    assert [list(one.tools) for one in read_demonstrations(config.train[0], config)] == [rows[0]["tools"]] * 2


def test_values_that_datasets_writes_as_json_text_are_read(tmp_path: Path) -> None:
    """datasets 5 does so where rows differ in their types or keys."""
    rows = [{"messages": chat({key: 3}), "tools": [tool("weather", key)]} for key in ("city", "day", "hour")]
    config = write(tmp_path, *rows)
    datasets.disable_progress_bars()
    stored = datasets.Dataset.from_json(config.train[0].path, cache_dir=str(tmp_path / "cache"))
    stored.to_parquet(tmp_path / "rows.parquet")
    found = demonstrate(config_of(tmp_path / "rows.parquet"), "qwen2.5")
    assert found == demonstrate(config, "qwen2.5") and '{"day": 3}' in found[1].answer


def test_nulls_of_json_are_values_of_arguments_and_defaults(tmp_path: Path) -> None:
    schema = tool("weather", "city", strict=None)
    schema["function"]["parameters"]["properties"]["city"] |= {"default": None, "enum": ["a", None], "items": None}
    (row,) = demonstrate(write(tmp_path, {"messages": chat({"city": None}), "tools": [schema]}), "qwen2.5")
    assert '"default": null, "enum": ["a", null]' in row.text and '"arguments": {"city": null}' in row.text
    assert "strict" not in row.text and "items" not in row.text


def forms_of(tools: list[dict[str, Any]]) -> list[Any]:
    functions = [one["function"] for one in tools]
    texts = [one | {"parameters": json.dumps(one["parameters"])} for one in functions]
    return [tools, json.dumps(tools), functions, list(map(json.dumps, tools)), json.dumps(functions), texts]


def test_tools_may_be_functions_or_json_text(tmp_path: Path) -> None:
    rows = [{"messages": chat(TEXT), "tools": one} for one in forms_of(deepcopy(TOOLS))]
    rows += [{"messages": chat(TEXT), "tools": one} for one in (None, [], "", "[]")] + [{"messages": chat(TEXT)}]
    found = demonstrate(write(tmp_path, *rows), "qwen2.5")
    assert len({row.text for row in found[:6]}) == 1 and len({row.text for row in found[6:]}) == 1
    assert "Find the tides." in found[0].text and "tools" not in found[6].text


@pytest.mark.parametrize(
    "tools", [["weather"], "weather", 3, [{"type": "function"}], [{"name": 3}], {"a": 1}], ids=repr
)
def test_sft_refuses_a_column_of_tools_that_has_no_schemas(tmp_path: Path, tools: Any) -> None:
    assert "tools: must be a list" in refusal(write(tmp_path, {"messages": chat(TEXT), "tools": tools}))


def test_names_of_tools_in_train_are_an_ordinary_column(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "1", "tools": one} for one in (["weather"], "weather", None)]
    found = prompts_of(write(tmp_path, *rows, {"prompt": "q", "answer": "1", "tools": TOOLS[:1]}), "qwen2.5")
    assert found[0].text == found[1].text == found[2].text != found[3].text and found[0].extras["tools"] == ["weather"]
    with pytest.raises(ConfigError, match=r"rows\.jsonl:4: .*rollout\.tools .*; leave one"):
        prompts_of(config_of(tmp_path / "rows.jsonl"), "qwen2.5", tools=TOOLS)
    assert "Find the tides." in prompts_of(write(tmp_path, *rows), "qwen2.5", tools=TOOLS)[0].text


def test_a_template_without_tools_refuses_rows_with_tools(tmp_path: Path) -> None:
    config = write(tmp_path, {"messages": chat(TEXT)[::3], "tools": TOOLS})
    assert "tools[0].function.name of the row: 'weather'" in refusal(config, "smollm2")


def test_rows_of_one_form_are_checked_with_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, rendered = make_tokenizer(PLAIN + CALLS + END), []
    apply = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **k: (rendered.append(a), apply(*a, **k))[1])
    renderer = Renderer(tokenizer)
    for number in range(37):
        messages = chat({"a": number, "b": f"text {number}", "c": [{"d": number * 0.5}]}, id=f"call{number:05d}")
        messages[2]["tool_call_id"] = f"call{number:05d}"
        renderer.render([clean(one, "m") for one in messages[:3]], "a:1")
    assert len(rendered) == 37 + 1
