"""A rendered prompt contains the text of every message, otherwise the row is refused."""

import json
import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from grpo_mega.data.chat import Renderer
from grpo_mega.errors import ConfigError
from tests.data.test_dataset import make_tokenizer

TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
ALL = "{% for m in messages %}" + TURN + "{% endfor %}<|assistant|>"
TRIMS = ALL.replace("m.content", "m.content | trim")
# Like Qwen3's template: omits the thought of an assistant turn.
STRIPS_THOUGHTS = ALL.replace(
    "m.content", "m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content"
)
TOJSON = ALL.replace("m.content", "m.content | tojson if m.role == 'tool' else m.content")
SYSTEM_LAST = (  # like Mistral's template: the system message is in the last user turn
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{% if loop.last and messages[0].role == 'system' %}{{"
    " messages[0].content }}\n\n{% endif %}{{ m.content }}{% endfor %}"
)


def roles(*names: str) -> str:
    return "{% for m in messages if m.role in " + json.dumps(names) + " %}" + TURN + "{% endfor %}<|assistant|>"


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    return make_tokenizer(template)


def render(template: str, *turns: tuple[str, str], **extra: Any) -> str:
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in turns]
    messages[0] |= extra
    return Renderer(tokenizer(template)).render(messages, "set.jsonl:5")


def refused(template: str, *turns: tuple[str, str]) -> int:
    """Return the number of the message that the error names."""
    with pytest.raises(ConfigError) as caught:
        render(template, *turns)
    match = re.match(
        r"set\.jsonl:5: the chat template leaves out text of message (\d+) \(role '(\w+)'\): ", str(caught.value)
    )
    assert match is not None and "\n" not in str(caught.value), caught.value
    assert turns[int(match[1])][0] == match[2]
    return int(match[1])


@pytest.mark.parametrize("text", ["What is 1+1?", "a", "user", "1", "  a\u2028b\n", "<|user|>", "{}"])
def test_a_message_of_a_role_that_the_template_ignores_is_refused(text: str) -> None:
    assert refused(roles("system", "assistant"), ("user", text)) == 0
    assert refused(roles("user"), ("system", text), ("user", text)) == 0
    assert refused(roles("user", "assistant"), ("user", "q"), ("assistant", "r"), ("tool", text)) == 2
    assert text.strip() in render(ALL, ("system", "s"), ("user", text))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content[:21] }}{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | replace('cat', 'dog') }}{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content | e }}{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{% if 'cat' not in m.content %}{{ m.content }}{% endif %}{% endfor %}",
        "{{ messages[-1].content[:21] }}{{ messages[-1].role }}",
    ],
)
def test_a_template_that_changes_some_texts_is_refused_for_these_texts(template: str) -> None:
    assert refused(template, ("user", "Why is </think> behind 3 < 4, cat?")) == 0
    assert "dog" in render(template, ("user", "dog"))


def test_only_the_last_message_is_not_enough() -> None:
    last = "{{ messages[-1].content }}<|assistant|>"
    assert render(last, ("user", "q")) == "q<|assistant|>"
    assert refused(last, ("user", "q"), ("assistant", "a"), ("user", "q")) == 0


def test_system_messages_may_go_anywhere_and_spaces_at_ends_may_go() -> None:
    assert render(SYSTEM_LAST, ("system", "be brief"), ("user", "u"), ("assistant", "a"), ("user", "v")).endswith(
        "be brief\n\nv"
    )
    assert (
        render(TRIMS, ("system", " \n "), ("user", "\n 1+1 \u2028"), ("assistant", ""), ("user", "x ")).count("<|end|>")
        == 4
    )
    assert refused(ALL.replace("m.content", "m.content | replace('  ', ' ')"), ("user", "a  b")) == 0


@pytest.mark.parametrize(
    "answer",
    [
        "<think>\nlong\n</think>\n\n4",
        "long, begun by the template\n</think>4",
        "<think>a</think>4",
        "<think>cut off",
        "4",
        "",
    ],
)
def test_the_thoughts_of_earlier_turns_of_the_assistant_may_be_missing(answer: str) -> None:
    text = render(STRIPS_THOUGHTS, ("user", "2+2"), ("assistant", answer), ("user", "why?"))
    assert "long" not in text and "why?" in text


def test_text_of_the_assistant_around_its_thoughts_may_not_be_missing() -> None:
    drops = STRIPS_THOUGHTS.replace("[-1]", "[0]")
    assert refused(drops, ("user", "2+2"), ("assistant", "<think>long</think>four"), ("user", "why?")) == 1
    assert (
        refused(STRIPS_THOUGHTS, ("user", "2+2"), ("assistant", "Well <think>long</think>four"), ("user", "why?")) == 1
    )
    assert refused(roles("user"), ("user", "2+2"), ("assistant", "<think>a</think>"), ("user", "why?")) == 1


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TOJSON, 'a "quoted" \\ text\nof two lines\u2028and é'),
        (TOJSON, '{"a": [1, 2.5, null], "b": "\\n"}'),
        (ALL.replace("m.content", "m.content | replace(' ', '')"), '{"b": {"x": 1}, "a": [1, 2]}'),
        (ALL.replace("m.content", "m.content | replace('\\n', '') | replace('  ', '')"), '[\n  {"a":1},\n  2\n]'),
        (ALL.replace("m.content", "{'result': m.content} | tojson"), 'is 5" wide, and\n[not] {json'),
    ],
)
def test_json_that_is_equal_by_value_is_not_missing(template: str, text: str) -> None:
    assert render(template, ("user", 'a "b and {c'.replace(" ", "")), ("tool", text)).endswith("<|assistant|>")


def test_json_with_another_value_is_missing() -> None:
    template = ALL.replace("m.content", "m.content | replace('2', '3')")
    assert refused(template, ("user", '{"a": [1, 2]}')) == 0


def test_tool_calls_without_text_and_templates_that_read_text_are_accepted() -> None:
    calls = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}{% endfor %}"
    call = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert '"name": "f"' in render(calls, ("assistant", ""), ("tool", "3"), tool_calls=call)
    with pytest.raises(ConfigError, match=r"message 0 .*'assistant'.*'let me see'"):
        render(calls, ("assistant", "let me see"), ("tool", "3"), tool_calls=call)
    reads = "{% if '+' not in messages[0].content %}{{ raise_exception('no sum') }}{% endif %}" + ALL
    assert "1+1" in render(reads, ("user", "1+1"))


def test_one_renderer_checks_every_row_separately() -> None:
    renderer = Renderer(tokenizer(roles("system", "user")))
    turns = [{"role": "user", "content": "q"}]
    assert renderer.render(turns, "a:1") == renderer.render(turns, "a:2") == "<|user|>q<|end|><|assistant|>"
    with pytest.raises(ConfigError, match=r"^a:3: .*message 1 .*'tool'"):
        renderer.render([*turns, {"role": "tool", "content": "q"}], "a:3")
    assert renderer.render([{"role": "system", "content": "s"}, *turns], "a:4").startswith("<|system|>s")
