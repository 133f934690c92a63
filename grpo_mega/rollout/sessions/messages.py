"""Messages of a chat: checked, made ready for a chat template, compared by content, and reduced to their form."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from grpo_mega.text import well_formed

Message = dict[str, Any]  # role, content, and for some roles tool_calls, tool_call_id and name
ROLES = ("system", "user", "assistant", "tool")
# Keys that this endpoint or the openai package adds to an answer. They do not belong to the conversation.
_ANSWER_KEYS = {"invalid_tool_calls", "refusal", "annotations", "audio", "function_call"}
TAG = re.compile(r"(</?(?:think|thinking|thought|reasoning)>)")  # start or end of a thought
_CALL_ID = "callqzxv0"  # nine letters and digits, because Mistral's templates require them


class RequestError(Exception):
    """A request that is refused. `code` and the HTTP status tell the client why."""

    def __init__(self, message: str, *, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def clean(message: Any, place: str) -> Message:
    """Return a client's message as a chat template reads it. Raise RequestError if it is not a message.

    Content is text, "" if there is none. Arguments of tool calls are values, not JSON text, if the text is valid. A
    lone surrogate becomes U+FFFD. Keys without a value are absent.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestError(f"{place}: must be an object with a role of {', '.join(ROLES)}")
    kept = {k: well_formed_json(v) for k, v in message.items() if k not in _ANSWER_KEYS and v not in (None, [], {})}
    content = kept.get("content", "")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
        raise RequestError(f"{place}.content: must be a text, or a list of text parts")
    kept["content"] = "".join(part["text"] for part in parts)
    if "tool_calls" in kept:
        if message["role"] != "assistant" or not isinstance(kept["tool_calls"], list):
            raise RequestError(f"{place}.tool_calls: must be a list in an assistant message")
        calls: list[dict[str, Any]] = []
        for call in kept["tool_calls"]:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise RequestError(f"{place}.tool_calls: each call must have a function with a name")
            arguments = function.get("arguments", {})
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError, RecursionError):  # such a text stays a text
                    arguments = well_formed_json(json.loads(arguments or "{}"))
            named = {"name": function["name"], "arguments": arguments}
            calls.append({"type": "function", **call, "function": named})
        kept["tool_calls"] = calls
    return kept


def well_formed_json(value: Any) -> Any:
    """Return JSON values with U+FFFD instead of each lone surrogate."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, dict):
        return {well_formed(str(key)): well_formed_json(item) for key, item in value.items()}
    return [well_formed_json(item) for item in value] if isinstance(value, list) else value


def digest(before: bytes, message: Message) -> bytes:
    """Return a digest of a path of messages that ends with `message`. `before` is the digest of the path before it.

    Messages with the same content have the same digest. Spaces at the end of a text, the order of keys, the type of a
    whole number, and the ids of an assistant's calls are not content.
    """
    content = message["content"].strip() if message["role"] == "assistant" else message["content"].rstrip()
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    others = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
    return digest_of(before, [content, calls, others])


def digest_of(before: bytes, value: Any) -> bytes:
    """Return a digest of JSON values after others."""
    text = json.dumps(_whole_numbers(value), sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _whole_numbers(value: Any) -> Any:
    """Return the value with 2 instead of 2.0, as JavaScript writes it."""
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def forms(messages: Sequence[Message], name: str) -> list[Message]:
    """Return short messages of the same form: `mark` texts instead of texts, and one call instead of all calls.

    A chat template treats both lists alike, because it reads roles, thoughts, tool calls, and whether there is text.
    """
    found = []
    for number, message in enumerate(messages):
        title, content = f"{name}{number:05d}", message["content"]
        parts = TAG.split(content) if message["role"] == "assistant" else [content]
        texts = [part if i % 2 else mark(f"{title}p{i}") if part.strip() else "" for i, part in enumerate(parts)]
        form: Message = {"role": message["role"], "content": "\n".join(text for text in texts if text)}
        if "tool_calls" in message:
            function = {"name": "f", "arguments": {"a": mark(f"{title}call")}}
            form["tool_calls"] = [{"id": _CALL_ID, "type": "function", "function": function}]
        others = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
        found.append(form | {key: _CALL_ID if key == "tool_call_id" else mark("other") for key in others})
    return found


def mark(name: str) -> str:
    """Return a text that no template writes."""
    return f"qzxv{name}vxzq"


MARK = re.compile("qzxv[a-z0-9_]+?vxzq")
