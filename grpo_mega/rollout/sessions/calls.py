"""Tool calls in the tokens of a sampled turn, by the format of the model's family.

Where the mark of a call is one token of the vocabulary, only this token opens a call. The same characters from other
tokens are text. So are calls inside a thought. Prompts and tool results are never parsed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_mega.rollout.sessions.messages import TAG, Message
from grpo_mega.rollout.sessions.template import Template

Decode = Callable[[Sequence[int]], str]
FORMATS = ("hermes", "llama3", "mistral")
_OPENING = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_CLOSING = "</tool_call>"


@dataclass
class ParsedTurn:
    """`invalid` has the text of each call that cannot be parsed, and why, for the agent to tell the model."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI's form
    invalid: list[dict[str, str]] = field(default_factory=list)


class CallParser:
    def __init__(self, template: Template, decode: Decode, tool_format: str = "auto") -> None:
        """`tool_format` "auto": the format in which the template renders a call, or hermes if it renders none."""
        self._tokenizer, self.decode = template.tokenizer, decode
        self._starts_in_thought = any(not tag.startswith("</") for tag in TAG.findall(template.prefill)[-1:])
        self.format = tool_format
        if tool_format == "auto":
            self.format = next((name for name in FORMATS if self._reads(name, template)), "hermes")
        opening = _OPENING[self.format]
        ids = self._tokenizer(opening, add_special_tokens=False)["input_ids"]
        self._opening, self._opening_id = opening, ids[0] if len(ids) == 1 else None

    def _reads(self, name: str, template: Template) -> bool:
        """Return True if the parser of a format reads the call that the template writes."""
        wanted = ("f", {"a": 12, "b": ["c"]})
        function = {"name": wanted[0], "arguments": wanted[1]}
        text = template.render_call([{"type": "function", "id": "callqzxv0", "function": function}])
        text = min((text.partition(stop)[0] for stop in template.stop_texts), key=len, default=text)
        content, *pieces = text.split(_OPENING[name])
        calls, errors, _ = _PARSERS[name](content, pieces)
        return not errors and calls == [wanted]

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Return the text and the calls of a turn. If a call cannot be parsed, the content is the whole text."""
        (content, *pieces), is_in_thought = self._pieces(token_ids)
        if is_in_thought:
            return ParsedTurn(content)
        try:
            calls, errors, content = _PARSERS[self.format](content, pieces)
        except RecursionError:
            calls, errors = [], [(content, "nested too deeply")]
        if errors:
            return ParsedTurn(self.decode(token_ids), [], [{"text": text, "error": why} for text, why in errors])
        parsed = ParsedTurn(content)
        for number, (name, arguments) in enumerate(calls):
            # Nine letters and digits, because Mistral's templates require them. Equal turns get equal ids.
            name_bytes = json.dumps([number, *map(int, token_ids)]).encode()
            call_id = hashlib.blake2b(name_bytes, digest_size=5).hexdigest()[:9]
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            parsed.calls.append({"id": call_id, "type": "function", "function": function})
        return parsed

    def written(self, message: Message) -> str:
        """Return the text of a message with its calls, for a template that does not render calls."""
        key = "parameters" if self.format == "llama3" else "arguments"
        closing = _CLOSING if self.format == "hermes" else ""
        calls = [{"name": c["function"]["name"], key: c["function"]["arguments"]} for c in message["tool_calls"]]
        texts = [f"{self._opening}{json.dumps(call, ensure_ascii=False)}{closing}" for call in calls]
        return "".join([message["content"], *texts])

    def _pieces(self, token_ids: Sequence[int]) -> tuple[list[str], bool]:
        """Split a turn at the marks that open a call outside of thoughts. Return True if it ends inside a thought."""
        if self._opening_id is None:
            pieces = self.decode(token_ids).split(self._opening)
        else:
            places = [place for place, token in enumerate(token_ids) if token == self._opening_id]
            borders = zip([0, *(place + 1 for place in places)], [*places, len(token_ids)], strict=True)
            pieces = [self.decode(token_ids[start:end]) for start, end in borders]
        is_inside, last = self._starts_in_thought, 0  # the last piece that starts inside a thought
        for number, piece in enumerate(pieces):
            last = number if is_inside else last
            # The arguments of a call may contain the tags of a thought.
            text = piece if is_inside or number == 0 else piece.partition(_CLOSING)[2]
            for tag in TAG.findall(text)[-1:]:
                is_inside = not tag.startswith("</")
        if is_inside:
            last = len(pieces) - 1
        return [self._opening.join(pieces[: last + 1]), *pieces[last + 1 :]], is_inside


_Calls = tuple[list[tuple[str, Any]], list[tuple[str, str]], str]  # calls, texts that are no calls and why, content


def _hermes(content: str, pieces: list[str]) -> _Calls:
    """Parse <tool_call>{"name": ..., "arguments": ...}</tool_call>, also with a list of calls."""
    calls, errors, rest = [], [], ""
    for piece in pieces:
        body, closing, after = piece.partition(_CLOSING)
        found, why = _call_list(body, "arguments")
        if why or not closing:
            errors.append((body, why or f"{_CLOSING} is missing"))
        calls += found
        rest += after
    return calls, errors, (content.strip() + rest.rstrip() if pieces else content)


def _mistral(content: str, pieces: list[str]) -> _Calls:
    """Parse [TOOL_CALLS] [{"name": ..., "arguments": ...}], and [TOOL_CALLS]name[ARGS]{...} of newer models."""
    calls, errors = [], []
    for piece in pieces:
        if match := re.match(r"\s*([\w.-]+)(?:\[ARGS\])?(\{.*)", piece, re.DOTALL):
            piece = f'{{"name": {json.dumps(match[1])}, "arguments": {match[2]}}}'
        found, why = _call_list(piece, "arguments")
        errors += [(piece, why)] if why else []
        calls += found
    return calls, errors, content.strip() if pieces else content


def _llama3(content: str, pieces: list[str]) -> _Calls:
    """Parse a turn that is only {"name": ..., "parameters": ...}, or several of them with ";" between."""
    text = pieces[0] if pieces else TAG.split(content)[-1]
    before = content if pieces else content.removesuffix(text).strip()
    if not pieces and not re.match(r'\s*\{\s*"(?:name|parameters)"', text):
        return [], [], content
    values, rest = [], text.strip()
    try:
        while rest:
            value, end = json.JSONDecoder().raw_decode(rest)
            values.append(value)
            rest = rest[end:].lstrip().removeprefix(";").lstrip()
    except ValueError as error:
        return [], [(text, f"not JSON ({error})")], content
    found, why = _call_list(json.dumps(values), "parameters")
    return found, [(text, why)] if why else [], before


_PARSERS: dict[str, Callable[[str, list[str]], _Calls]] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}


def _call_list(text: str, key: str) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls in a JSON object or list, and "" or what is wrong."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return [], f"not JSON ({error})"
    calls = []
    for call in value if isinstance(value, list) and value else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return [], "a call must be an object with name"
        arguments = call.get(key, call.get("arguments", {}))
        if isinstance(arguments, str):
            return [], f"{key} must be an object, not a text"
        if not isinstance(arguments, dict):
            return [], f"{key} must be an object"
        calls.append((call["name"], arguments))
    return calls, ""
