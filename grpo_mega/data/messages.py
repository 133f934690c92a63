"""One form for chat messages and tool schemas, whoever wrote them: dataset rows and agents' clients.

Arguments of calls are values, also if they were JSON text, as in OpenAI's form. A thought has all the names that
templates read. Keys of null are absent, except for arguments and for the defaults of schemas. In a columnar format all
keys of null are absent, because such a format fills in the keys of other rows.

`mark_texts` puts a marker in place of each text, so that a rendering shows what a template omits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_MAY_BE_EMPTY = {*THOUGHTS, "tool_calls"}  # an empty text stands for none in columns that hold texts only

_CALL = r"tool_calls\[\d+\]\."
_NO_TEXT = re.compile(rf"(?:{_CALL})?(?:type|index)|role|{'|'.join(THOUGHTS)}")  # fields of a message
_ID, _CALLED = re.compile(rf"tool_call_id|(?:{_CALL})?id"), re.compile(rf"{_CALL}function\.name")

_MAX_DEPTH = 99  # functions that call themselves walk over the values


class MessageError(Exception):
    """A value is no message or schema. The text starts with the field within it."""


def read_message(message: Any) -> Message:
    """Return a message as a chat template reads it. Raises MessageError.

    Arguments stay a text if they are not JSON.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise MessageError(f"={short(message)} is not a message with role and content")
    kept = {key: value for key, value in message.items() if value not in (None, [], {})}
    kept = {key: value for key, value in kept.items() if key not in _MAY_BE_EMPTY or value not in ("", "[]", "null")}
    if "tool_calls" in kept:
        calls = parse_text(kept["tool_calls"])
        if kept["role"] != "assistant" or not isinstance(calls, list):
            raise MessageError(".tool_calls: must be a list in an assistant message")
        kept["tool_calls"] = [_read_call(call, f".tool_calls[{number}]") for number, call in enumerate(calls)]
    content = kept.get("content", "" if "tool_calls" in kept else message.get("content"))
    if isinstance(content, list) and content:
        content = "".join(_text_of(part, f".content[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise MessageError(f".content={short(content)} is neither a text nor a list of text parts")
    if names := [name for name in THOUGHTS if name in kept]:
        thoughts = [kept.pop(name) for name in names]
        if kept["role"] != "assistant" or any(one != thoughts[0] or not isinstance(one, str) for one in thoughts):
            raise MessageError(f".{names[-1]}={short(thoughts[-1])}: must be the one text of an assistant's thought")
        if thoughts[0].strip():
            kept |= dict.fromkeys(THOUGHTS, thoughts[0])
    return kept | {"content": content}


def read_tools(value: Any, null_values: Collection[str] = ("default", "const")) -> list[dict[str, Any]]:
    """Return tool schemas in OpenAI's form. Functions alone are wrapped, and JSON text is read. Raises MessageError.

    Null is a value of the keys in `null_values`.
    """
    tools = []
    for given in value if isinstance(value := parse_text(value or []) or [], list) else [value]:
        tool = without_nulls(parse_text(given), null_values)
        if isinstance(tool, dict) and "function" not in tool:
            tool = {"type": "function", "function": {key: item for key, item in tool.items() if key != "type"}}
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessageError(': must be a list of {"type": "function", "function": {"name": ...}}')
        if "parameters" in function:
            function["parameters"] = without_nulls(parse_text(function["parameters"]), null_values)
        tools.append(tool)
    return tools


def parse_text(value: Any) -> Any:
    """Return the value of a JSON text; another value, and a text that is not JSON or nested too deeply, as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            return found if _depth(found) < _MAX_DEPTH else value
    return value


def without_nulls(value: Any, null_values: Collection[str] = ()) -> Any:
    """Return JSON values without keys of null, at every depth, except for the keys in `null_values`."""
    if isinstance(value, dict):
        return {k: without_nulls(v, null_values) for k, v in value.items() if v is not None or k in null_values}
    return [without_nulls(item, null_values) for item in value] if isinstance(value, list) else value


def short(value: Any) -> str:
    """Return a value for an error."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _read_call(call: Any, field: str) -> dict[str, Any]:
    call = {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else {}
    if "function" not in call:  # the function alone
        call["function"] = {key: call.pop(key) for key in ("name", "arguments") if key in call}
    function = call["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MessageError(f"{field}: must be a call with the name of its function")
    arguments = function.get("arguments")
    arguments = {} if arguments is None or arguments == "" else parse_text(arguments)
    others = {key: value for key, value in function.items() if value is not None and key != "arguments"}
    call["function"] = {"name": function["name"], "arguments": arguments} | others
    return {"type": "function"} | call


def _text_of(part: Any, field: str) -> str:
    given = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if given.keys() != {"type", "text"} or given["type"] != "text" or not isinstance(given["text"], str):
        raise MessageError(
            f'{field}={short(part)}: must be {{"type": "text", "text": ...}}, because prompts are text only'
        )
    return given["text"]


def mark_texts(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> tuple[list[Any], dict[str, tuple[int, str, Any]]]:
    """Return messages and tools with a marker as each text, and number, field and value of each marker's text.

    The number of the message is -1 for tools. Ids keep their lengths. Thoughts have no markers. The name of a tool
    message has the marker of the call of this function.
    """
    places: dict[str, tuple[int, str, Any]] = {}
    names: dict[Any, str] = {}
    ids: dict[Any, str] = {}

    def mark(value: Any, number: int, field: str) -> Any:
        if isinstance(value, dict):
            return {key: mark(item, number, f"{field}.{key}".lstrip(".")) for key, item in value.items()}
        if isinstance(value, list):
            return [mark(item, number, f"{field}[{place}]") for place, item in enumerate(value)]
        if _NO_TEXT.fullmatch(field) or value is None or not str(value).strip():
            return value
        if _ID.fullmatch(field):
            return ids.setdefault(value, str(len(ids)).zfill(len(str(value))))
        if field == "name" and value in names:
            return names[value]
        marker = f"text{len(places)}qzxv"
        if _CALLED.fullmatch(field):
            names[value] = marker
        places[marker] = number, field, value
        return marker

    marked_tools = []
    for number, tool in enumerate(tools):
        name = mark(tool["function"]["name"], -1, f"tools[{number}].function.name")
        marked_tools.append(tool | {"function": tool["function"] | {"name": name}})
    return [[mark(message, number, "") for number, message in enumerate(messages)], marked_tools], places
