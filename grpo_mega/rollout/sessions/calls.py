"""Tool calls in the tokens of a sampled turn, in the format of the model's family.

Where the mark of a call is one token of the vocabulary, only this token opens a call. The same characters from other
tokens are text. So are calls inside a thought. Prompts and tool results are never parsed.

Engines name the formats alike:

hermes       <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>, also of Qwen 2.5 and 3
glm45        <tool_call>f <arg_key>a</arg_key> <arg_value>1</arg_value></tool_call>
qwen3_coder  <tool_call><function=f><parameter=a>1</parameter></function></tool_call>, also of Qwen 3.5
llama3       {"name": "f", "parameters": {"a": 1}}, or several of them with ";" between
mistral      [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}], and [TOOL_CALLS]f[ARGS]{"a": 1} of newer models
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpo_mega.rollout.sessions.template import TAG, Message, Template, Tools

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
            arguments = {"a": 12, "b": ["c"]}
            text = template.render_call(arguments)
            text = min((text.partition(stop)[0] for stop in template.stops.values()), key=len, default=text)
            for name, known in FORMATS.items():
                content, *pieces = text.split(known.opening)
                found = known.read(content, pieces, None)
                if not found.invalid and found.calls == [("f", arguments)]:
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


CLOSING = "</tool_call>"
Call = tuple[str, Any]  # name and arguments


@dataclass
class FoundCalls:
    """The calls of a turn. `invalid` has texts that are no calls, and why."""

    content: str
    calls: list[Call] = field(default_factory=list)
    invalid: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class CallFormat:
    """`opening` is the mark of a call. `read` gets the text before the first mark and the text after each mark."""

    opening: str
    read: Callable[[str, list[str], Tools], FoundCalls]
    write: Callable[[str, Any], str]  # returns the text of a call with this name and these arguments


def _marked(
    read: Callable[[str, Tools], list[Call]], *, is_closed: bool = True
) -> Callable[[str, list[str], Tools], FoundCalls]:
    """Return the reader of calls after marks. `read` returns the calls of a text, or raises ValueError.

    `is_closed`: a call ends with CLOSING, and text may follow.
    """

    def read_all(content: str, pieces: list[str], tools: Tools) -> FoundCalls:
        found, rest = FoundCalls(content.strip() if pieces else content), ""
        for piece in pieces:
            body, closing, after = piece.partition(CLOSING) if is_closed else (piece, "", "")
            try:
                found.calls += read(body, tools)
                if is_closed and not closing:
                    raise ValueError(f"{CLOSING} is missing")
            except ValueError as error:
                found.invalid.append((body, str(error)))
            rest += after
        found.content += rest.rstrip()
        return found

    return read_all


def _mistral(text: str, tools: Tools) -> list[Call]:
    if match := re.match(r"\s*([\w.-]+)(?:\[ARGS\])?(\{.*)", text, re.DOTALL):
        text = f'{{"name": {json.dumps(match[1])}, "arguments": {match[2]}}}'
    return _read_json(text, tools)


def _llama3(content: str, pieces: list[str], tools: Tools) -> FoundCalls:
    text = pieces[0] if pieces else TAG.split(content)[-1]
    before = content if pieces else content.removesuffix(text).strip()
    if not pieces and not re.match(r'\s*\{\s*"(?:name|parameters)"', text):
        return FoundCalls(content)
    try:
        return FoundCalls(before, _calls_of(list(_json_values(text)), "parameters"))
    except ValueError as error:
        return FoundCalls(content, [], [(text, str(error))])


def _json_values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, which may have ";" between them. Raise ValueError."""
    rest = text.strip()
    while rest:
        try:
            value, end = json.JSONDecoder().raw_decode(rest)
        except ValueError as error:
            raise ValueError(f"not JSON ({error})") from None
        yield value
        rest = rest[end:].lstrip().removeprefix(";").lstrip()


def _read_json(text: str, tools: Tools) -> list[Call]:
    """Return the calls in a JSON object or list. Raise ValueError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    return _calls_of(value, "arguments")


def _calls_of(value: Any, key: str) -> list[Call]:
    calls = []
    for call in value if isinstance(value, list) and value else [value]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("a call must be an object with name")
        arguments = call.get(key, call.get("arguments", {}))
        if not isinstance(arguments, dict):
            raise ValueError(f"{key} must be an object" + ", not a text" * isinstance(arguments, str))
        calls.append((call["name"], arguments))
    return calls


def _write_json(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


_TYPES: dict[Any, Any] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
    "null": type(None),
}


@dataclass(frozen=True)
class _Xml:
    """A format with an XML element per argument. `name` and `argument` match what `write` writes with their forms."""

    name: str
    argument: str
    end: str
    name_form: str
    argument_form: str

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Return the call of a text between the tags. Raise ValueError."""
        if not (match := re.match(self.name, text)):
            raise ValueError("the name of the function is missing")
        name, place, arguments = match[1], match.end(), dict[str, Any]()
        while match := re.compile(self.argument, re.DOTALL).match(text, place):
            schema: Any = next((tool["function"] for tool in tools or () if tool["function"]["name"] == name), {})
            for key in ("parameters", "properties", match[1]):
                schema = schema.get(key) if isinstance(schema, dict) else None
            arguments[match[1]] = _typed(match[2], schema if isinstance(schema, dict) else {})
            place = match.end()
        if (rest := text[place:].strip()) != self.end:
            wanted = f"an argument or {self.end}" if self.end else "an argument"
            raise ValueError(f"{rest[:80]!r} is not {wanted}")
        return [(name, arguments)]

    def write(self, name: str, arguments: Any) -> str:
        given = arguments.items() if isinstance(arguments, dict) else ()
        texts = ((key, one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)) for key, one in given)
        return "".join([self.name_form.format(name), *(self.argument_form.format(*text) for text in texts), self.end])


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument. It is a text if the schema says so, or if the text is no JSON.

    The schema is {} if the tools do not describe the argument.
    """
    alternatives = [one for one in schema.get("anyOf") or [schema] if isinstance(one, dict)]
    kinds = [one.get("type") for one in alternatives]
    types = [kind for one in kinds for kind in (one if isinstance(one, list) else [one])]
    try:
        value = json.loads(text, parse_constant=int)  # int raises ValueError for NaN
    except ValueError:
        return text
    has_type = any(isinstance(value, _TYPES.get(kind, ())) for kind in types)
    return text if isinstance(value, str) or ("string" in types and not has_type) else value


_GLM = _Xml(
    r"\s*([^\s<>{}\[\]]+)",
    r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>",
    "",
    "{}\n",
    "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
)
_QWEN = _Xml(
    r"\s*<function=([^>\n]+)>",
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>",
    "</function>",
    "\n<function={}>\n",
    "<parameter={}>\n{}\n</parameter>\n",
)
FORMATS = {
    "hermes": CallFormat("<tool_call>", _marked(_read_json), lambda *call: _write_json(*call) + CLOSING),
    "glm45": CallFormat("<tool_call>", _marked(_GLM.read), lambda *call: _GLM.write(*call) + CLOSING),
    "qwen3_coder": CallFormat("<tool_call>", _marked(_QWEN.read), lambda *call: f"{_QWEN.write(*call)}\n{CLOSING}"),
    "llama3": CallFormat("<|python_tag|>", _llama3, partial(_write_json, key="parameters")),
    "mistral": CallFormat("[TOOL_CALLS]", _marked(_mistral, is_closed=False), _write_json),
}
