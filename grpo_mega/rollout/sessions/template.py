"""A chat template at token level: the tokens of a new conversation, and the tokens that extend a sampled turn.

An extension renders only the new messages. They are rendered after a short history that stands for the real history,
and the text after the stop token of its last turn is encoded. So the separator between two turns is the template's.

A template may rewrite the history when messages follow, for example remove the thoughts of earlier turns. Then a turn
cannot be extended. The rule is found by comparing two renderings, before and after the new messages, of a conversation
of the same form with marks instead of texts. This is done once for each form.

The messages of a chat are checked, made ready for a template, compared by content, and reduced to their form.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from grpo_mega.data.chat import Renderer, find_end_token, find_prefill
from grpo_mega.data.messages import Message, MessageError, read_message
from grpo_mega.errors import ConfigError
from grpo_mega.text import well_formed

Tools = list[dict[str, Any]] | None  # descriptions of functions; None: the conversation has none
ROLES = ("system", "user", "assistant", "tool")
TAG = re.compile(r"(</?(?:think|thinking|thought|reasoning)>)")  # start or end of a thought
_CALL_ID = "callqzxv0"  # nine letters and digits, because Mistral's templates require them


class RequestError(Exception):
    """A request that is refused. `code` and the HTTP status tell the client why."""

    def __init__(self, message: str, *, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def clean(message: Any, place: str) -> Message:
    """Return a client's message in the one form of data/messages.py. Raise RequestError if it is not a message.

    Content is "" if there is none. A lone surrogate becomes U+FFFD.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestError(f"{place}: must be an object with a role of {', '.join(ROLES)}")
    given = {key: value for key, value in message.items() if key != "invalid_tool_calls"}
    try:
        found = read_message(given | {"content": message.get("content") or ""})
    except MessageError as error:
        raise RequestError(f"{place}{error}") from None
    return {key: well_formed_json(value) for key, value in found.items()}


def well_formed_json(value: Any) -> Any:
    """Return JSON values with U+FFFD instead of each lone surrogate."""
    return _with_leaves(value, lambda leaf: well_formed(leaf) if isinstance(leaf, str) else leaf)


def _with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return JSON values with each key, text, number and constant changed."""
    if isinstance(value, dict):
        return {change(str(key)): _with_leaves(item, change) for key, item in value.items()}
    return [_with_leaves(item, change) for item in value] if isinstance(value, list) else change(value)


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
    text = json.dumps(_with_leaves(value, _whole_number), sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _whole_number(value: Any) -> Any:
    """Return 2 instead of 2.0, as JavaScript writes it, and any other value as it is."""
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
            form["tool_calls"] = [example_call({"a": mark(f"{title}call")})]
        others = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
        found.append(form | {key: _CALL_ID if key == "tool_call_id" else mark("other") for key in others})
    return found


def example_call(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a call of the function f."""
    return {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}


def mark(name: str) -> str:
    """Return a text that no template writes."""
    return f"qzxv{name}vxzq"


MARK = re.compile("qzxv[a-z0-9_]+?vxzq")


_MAX_FORMS = 10_000  # forms of conversations whose borders are stored
_MAX_TOOL_LISTS = 100  # lists of tools whose renderers are stored
_QUESTION: Message = {"role": "user", "content": "question"}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True)
class _Boundary:
    """How messages of one form follow a history of one form."""

    history: list[Message]  # stands for the history in a rendering
    needs_tools: bool  # the text of the new messages depends on the tools
    head: str  # the rendering of `history` up to the stop token that ends its last turn
    stop_id: int


class Template:
    """Not for use by several threads at once."""

    def __init__(self, tokenizer: Any, stop_token_ids: Collection[int]) -> None:
        """Check the template. Raise ConfigError if it cannot render a second turn, or if no stop token ends a turn."""
        self.tokenizer = tokenizer
        self.prefill = find_prefill(tokenizer)
        self.counts: Counter[str] = Counter()  # characters rendered, characters of forms rendered, and tokens encoded
        # Keyed by JSON, because messages and tools cannot be hashed.
        self._renderer = lru_cache(_MAX_TOOL_LISTS)(lambda tools: Renderer(tokenizer, json.loads(tools) or ()))
        self._boundary = lru_cache(_MAX_FORMS)(lambda form: self._find_boundary(*json.loads(form)))
        # Texts of the stop tokens that have one, keyed by token.
        self.stops = {token: text for token in sorted(stop_token_ids) if (text := tokenizer.decode([token]))}
        if problem := find_end_token(tokenizer, stop_token_ids)[1]:
            raise ConfigError(problem)
        self.shows_calls = mark("call") in self.render_call({"a": mark("call")})

    def render_call(self, arguments: dict[str, Any]) -> str:
        """Return the text of an assistant turn with a call of f with these arguments; "" if the template cannot render
        it.
        """
        try:
            before = self._apply([_QUESTION], [_TOOL], add_generation_prompt=True)
            turn = {"role": "assistant", "content": "", "tool_calls": [example_call(arguments)]}
            return self._apply([_QUESTION, turn], [_TOOL]).removeprefix(before)
        except Exception:  # templates raise any exception
            return ""

    def render(self, messages: Sequence[Message], tools: Tools) -> tuple[int, ...]:
        """Return the tokens of a whole conversation, up to where the model starts to write. Raise RequestError."""
        try:
            text = self._renderer(json.dumps(tools)).render(list(messages), "messages")
        except ConfigError as error:
            raise RequestError(" ".join(error.lines), code="template") from None
        return tuple(self._encode(text))

    def extend(
        self,
        history: Sequence[Message],
        suffix: Sequence[Message],
        tools: Tools,
        stop_id: int,
    ) -> tuple[int, ...] | None:
        """Return the tokens of `suffix` after a sampled turn, the last message of `history`, that ended with `stop_id`.

        The tokens end where the model starts to write. Return None if the tokens of the history are not a prefix of
        the conversation as the template renders it. Then the conversation must be rendered as a whole.
        """
        form = [forms(history, "h"), forms(suffix, "s"), [_TOOL] if tools else None]
        boundary = self._boundary(json.dumps(form))
        if boundary is None or boundary.stop_id != stop_id:
            return None
        try:
            messages = [*boundary.history, *suffix]
            text = self._apply(messages, tools if boundary.needs_tools else None, add_generation_prompt=True)
        except Exception:  # `render` reports it
            return None
        if not text.startswith(boundary.head):
            return None
        stop, tail = self.stops[stop_id], text[len(boundary.head) :]
        self.counts["rendered"] += len(boundary.head)
        # The text is encoded behind the stop token, because some tokenizers treat the start of a text differently.
        ids = self._encode(stop + tail)
        return tuple(ids[1:] if ids[0] == stop_id else self._encode(tail))

    def _apply(self, messages: list[Message], tools: Tools, *, add_generation_prompt: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.counts.update(rendered=len(text), encoded=len(ids))
        return ids

    def _find_boundary(self, history: list[Message], suffix: list[Message], tools: Tools) -> _Boundary | None:
        """Return how `suffix` follows `history`; None if the template rewrites the history or ends the turn without a
        stop token.

        The boundary has the shortest history with the same text: the system message, a question and the last turn.
        """
        wanted = self._split(history, suffix, tools)
        if wanted is None:
            return None
        start = history[:1] if history[0]["role"] == "system" else []
        question = {"role": "user", "content": mark("question")}
        for shorter in ([*start, question, history[-1]], history):
            for given in (None, tools) if tools else (None,):
                found = self._split(shorter, suffix, given)
                if found is not None and found[1:] == wanted[1:]:
                    return _Boundary(shorter, given is not None, found[0], found[2])
        return None

    def _split(self, history: list[Message], suffix: list[Message], tools: Tools) -> tuple[str, str, int] | None:
        """Return the rendering up to the stop token of the last turn of `history`, the text behind it, and the token.

        Return None if the rendering does not start with the prompt of that turn, or changes or omits a text.
        """
        try:
            before = self._apply(history[:-1], tools, add_generation_prompt=True)
            whole = self._apply([*history, *suffix], tools, add_generation_prompt=True)
        except Exception:  # templates raise any exception, for example for a tool message that follows no call
            return None
        self.counts["forms"] += len(before) + len(whole)
        turn, content = whole[len(before) :], history[-1]["content"]
        if not whole.startswith(before):
            return None
        own = MARK.findall(json.dumps(history[-1]))
        end = 0
        for text in own:
            if (place := turn.find(text, end)) < 0:
                return None
            end = place + len(text)
        marks = MARK.findall(json.dumps([m["content"] if m["role"] == "tool" else m for m in suffix]))
        limit = turn.find(marks[0], end) if marks else len(turn)
        if any(text not in turn[end:] for text in marks):
            return None
        stops = [
            (place, -len(text), token)
            for token, text in self.stops.items()
            if (place := turn.find(text, end, max(end, limit))) >= 0
        ]
        if not stops:
            return None
        place, length, token = min(stops)
        if TAG.findall(turn[:place]) != TAG.findall(content):
            return None
        shown, given = "".join(turn[:place].split()), "".join(content.split())
        # The text of calls differs from the form.
        if not (shown.startswith(given) if "tool_calls" in history[-1] else shown == given):
            return None
        return whole[: len(before) + place - length], turn[place - length :], token
