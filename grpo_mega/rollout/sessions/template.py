"""A chat template at token level: the tokens of a new conversation, and the tokens that extend a sampled turn.

An extension renders only the new messages. They are rendered after a short history that stands for the real history,
and the text after the stop token of its last turn is encoded. So the separator between two turns is the template's.

A template may rewrite the history when messages follow, for example remove the thoughts of earlier turns. Then a turn
cannot be extended. The rule is found by comparing two renderings, before and after the new messages, of a conversation
of the same form with marks instead of texts. This is done once for each form.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mega.data.chat import Renderer, find_closing, find_prefill
from grpo_mega.errors import ConfigError
from grpo_mega.rollout.sessions.messages import MARK, TAG, Message, RequestError, forms, mark

_MAX_FORMS = 10_000  # forms of conversations whose borders are stored
_MAX_TOOL_LISTS = 100  # lists of tools whose renderers are stored
_QUESTION: Message = {"role": "user", "content": "question"}
_CALL = {"type": "function", "id": "callqzxv0", "function": {"name": "f", "arguments": {"a": mark("call")}}}
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
        self._renderers: dict[str, Renderer] = {}  # by tools
        self._stops = {token: text for token in sorted(stop_token_ids) if (text := tokenizer.decode([token]))}
        self._boundaries: dict[str, _Boundary | None] = {}
        closing, has_stop = find_closing(tokenizer, stop_token_ids)
        if not has_stop:
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path!r} ends an assistant turn with {closing!r}, and none of "
                f"the stop tokens {sorted(stop_token_ids)}; add the token that ends a turn to rollout.stop_token_ids"
            )
        self.shows_calls = mark("call") in self.render_call([_CALL])

    @property
    def stop_texts(self) -> list[str]:
        return list(self._stops.values())

    def render_call(self, calls: list[dict[str, Any]]) -> str:
        """Return the text of an assistant turn with these tool calls; "" if the template cannot render it."""
        try:
            before = self._apply([_QUESTION], [_TOOL], add_generation_prompt=True)
            turn = {"role": "assistant", "content": "", "tool_calls": calls}
            return self._apply([_QUESTION, turn], [_TOOL]).removeprefix(before)
        except Exception:  # templates raise any exception
            return ""

    def render(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> tuple[int, ...]:
        """Return the tokens of a whole conversation, up to where the model starts to write. Raise RequestError."""
        key = json.dumps(tools)
        if key not in self._renderers:
            if len(self._renderers) >= _MAX_TOOL_LISTS:
                self._renderers.clear()
            self._renderers[key] = Renderer(self.tokenizer, tools or ())
        try:
            text = self._renderers[key].render(list(messages), "messages")
        except ConfigError as error:
            raise RequestError(" ".join(error.lines), code="template") from None
        return tuple(self._encode(text))

    def extend(
        self,
        history: Sequence[Message],
        suffix: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        stop_id: int,
    ) -> tuple[int, ...] | None:
        """Return the tokens of `suffix` after a sampled turn, the last message of `history`, that ended with `stop_id`.

        The tokens end where the model starts to write. Return None if the tokens of the history are not a prefix of
        the conversation as the template renders it. Then the conversation must be rendered as a whole.
        """
        old, new = forms(history, "h"), forms(suffix, "s")
        key = json.dumps([old, new, bool(tools)], sort_keys=True)
        if key not in self._boundaries:
            if len(self._boundaries) >= _MAX_FORMS:
                self._boundaries.clear()
            self._boundaries[key] = self._find_boundary(old, new, [_TOOL] if tools else None)
        boundary = self._boundaries[key]
        if boundary is None or boundary.stop_id != stop_id:
            return None
        try:
            messages = [*boundary.history, *suffix]
            text = self._apply(messages, tools if boundary.needs_tools else None, add_generation_prompt=True)
        except Exception:  # `render` reports it
            return None
        if not text.startswith(boundary.head):
            return None
        stop, tail = self._stops[stop_id], text[len(boundary.head) :]
        self.counts["rendered"] += len(boundary.head)
        # The text is encoded behind the stop token, because some tokenizers treat the start of a text differently.
        ids = self._encode(stop + tail)
        return tuple(ids[1:] if ids[0] == stop_id else self._encode(tail))

    def _apply(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool = False
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.counts.update(rendered=len(text), encoded=len(ids))
        return ids

    def _find_boundary(
        self, history: list[Message], suffix: list[Message], tools: list[dict[str, Any]] | None
    ) -> _Boundary | None:
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

    def _split(
        self, history: list[Message], suffix: list[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[str, str, int] | None:
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
        marks = MARK.findall(json.dumps([message["content"] for message in suffix]))
        limit = turn.find(marks[0], end) if marks else len(turn)
        if any(text not in turn[end:] for text in marks):
            return None
        stops = [
            (place, -len(text), token)
            for token, text in self._stops.items()
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
