"""Tool calls in the tokens of a sampled turn, in the format of the model's family.

Where the mark of a call is one token of the vocabulary, only this token opens a call. The same characters from other
tokens are text. So are calls inside a thought. Prompts and tool results are never parsed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_mega.rollout.sessions.call_formats import CLOSING, FORMATS, FoundCalls, Tools
from grpo_mega.rollout.sessions.messages import TAG, Message
from grpo_mega.rollout.sessions.template import Template

Decode = Callable[[Sequence[int]], str]


@dataclass
class ParsedTurn:
    """`invalid` has the text of each call that cannot be parsed, and why, for the agent to tell the model."""

    content: str
    calls: list[dict[str, Any]] = field(default_factory=list)  # in OpenAI's form
    invalid: list[dict[str, str]] = field(default_factory=list)


class CallParser:
    def __init__(self, template: Template, decode: Decode, tool_format: str = "auto") -> None:
        """`tool_format` "auto": the first format whose parser reads a call that the template renders, else hermes."""
        self._tokenizer, self.decode = template.tokenizer, decode
        self._starts_in_thought = any(not tag.startswith("</") for tag in TAG.findall(template.prefill)[-1:])
        self.format = "hermes" if tool_format == "auto" else tool_format
        if tool_format == "auto":
            wanted = ("f", {"a": 12, "b": ["c"]})
            function = {"name": wanted[0], "arguments": wanted[1]}
            text = template.render_call([{"type": "function", "id": "callqzxv0", "function": function}])
            text = min((text.partition(stop)[0] for stop in template.stop_texts), key=len, default=text)
            for name, known in FORMATS.items():
                content, *pieces = text.split(known.opening)
                found = known.read(content, pieces, None)
                if not found.invalid and found.calls == [wanted]:
                    self.format = name
                    break
        self._format = FORMATS[self.format]
        ids = self._tokenizer(self._format.opening, add_special_tokens=False)["input_ids"]
        self._opening_id = ids[0] if len(ids) == 1 else None

    def parse(self, token_ids: Sequence[int], tools: Tools = None) -> ParsedTurn:
        """Return the text and the calls of a turn. If a call cannot be parsed, the content is the whole text.

        XML has no types, so there the schemas of `tools` decide which arguments are texts.
        """
        (content, *pieces), is_in_thought = self._pieces(token_ids)
        if is_in_thought:
            return ParsedTurn(content)
        try:
            found = self._format.read(content, pieces, tools)
        except RecursionError:
            found = FoundCalls(content, [], [(content, "nested too deeply")])
        if found.invalid:
            return ParsedTurn(self.decode(token_ids), [], [{"text": text, "error": why} for text, why in found.invalid])
        parsed = ParsedTurn(found.content)
        for number, (name, arguments) in enumerate(found.calls):
            # Nine letters and digits, because Mistral's templates require them. Equal turns get equal ids.
            name_bytes = json.dumps([number, *map(int, token_ids)]).encode()
            call_id = hashlib.blake2b(name_bytes, digest_size=5).hexdigest()[:9]
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            parsed.calls.append({"id": call_id, "type": "function", "function": function})
        return parsed

    def written(self, message: Message) -> str:
        """Return the text of a message with its calls, for a template that does not render calls."""
        calls = (self._format.write(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"])
        return "".join([message["content"], *(self._format.opening + call for call in calls)])

    def _pieces(self, token_ids: Sequence[int]) -> tuple[list[str], bool]:
        """Split a turn at the marks that open a call outside of thoughts. Return True if it ends inside a thought."""
        if self._opening_id is None:
            pieces = self.decode(token_ids).split(self._format.opening)
        else:
            places = [place for place, token in enumerate(token_ids) if token == self._opening_id]
            borders = zip([0, *(place + 1 for place in places)], [*places, len(token_ids)], strict=True)
            pieces = [self.decode(token_ids[start:end]) for start, end in borders]
        is_inside, last = self._starts_in_thought, 0  # the last piece that starts inside a thought
        for number, piece in enumerate(pieces):
            last = number if is_inside else last
            # The arguments of a call may contain the tags of a thought.
            text = piece if is_inside or number == 0 else piece.partition(CLOSING)[2]
            for tag in TAG.findall(text)[-1:]:
                is_inside = not tag.startswith("</")
        if is_inside:
            last = len(pieces) - 1
        return [self._format.opening.join(pieces[: last + 1]), *pieces[last + 1 :]], is_inside
