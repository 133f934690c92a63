"""Render chats with a tokenizer's chat template: prompts, and demonstrations with a loss mask by turns.

The prefill is the text that a template writes into the assistant's turn. It is found by comparing two renderings of one
conversation: the generation prompt, and an assistant turn whose content is a marker. The text before the marker is the
header of every assistant turn. The rest of the generation prompt is the prefill, for example "<think>\\n".

Every rendered prompt is compared with its messages, because a template that omits the text of a message would train on
another question.

`sft` trains the assistant's messages of demonstrations. The tokens of a turn follow the tokens of the prompt with which
an engine would generate it. So a chat is one segment of tokens if each of these prompts continues the text before it.
If the template changes earlier turns, for example removes their thoughts, a turn starts another segment with the prompt
as the template renders it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import accumulate, chain
from typing import Any

from grpo_mega.config.data import DataConfig, DataSource
from grpo_mega.data.messages import THOUGHTS, mark_texts, short
from grpo_mega.data.rows import Conversation, read_demonstrations
from grpo_mega.errors import ConfigError
from grpo_mega.text import find_surrogate, num_common
from grpo_mega.types import Prompt

_MARKER = "\N{REPLACEMENT CHARACTER}content\N{REPLACEMENT CHARACTER}"
_QUESTION = {"role": "user", "content": "question"}
_ANSWER = {"role": "assistant", "content": _MARKER}
_TAGS = "think|thinking|thought|reasoning"
_OPEN_THOUGHT = re.compile(rf"<({_TAGS})>\s*\Z")
_THOUGHT = re.compile(rf"<(?:{_TAGS})>.*?(?:</(?:{_TAGS})>|\Z)", re.DOTALL)
_ANY_TAG = re.compile(rf"</?(?:{_TAGS})>")
_END_OF_THOUGHT = re.compile(rf"</(?:{_TAGS})>")
_CLOCK = "strftime_now"  # transformers' function for chat templates; a variable of the same name comes first
_JSON_START = re.compile(r'[\[{"]')


def check_chat_template(tokenizer: Any) -> None:
    """Raise ConfigError if the tokenizer has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; "
            "add chat_template to its tokenizer_config.json, or name an instruct model as model.path"
        )


def writes_date(tokenizer: Any) -> bool:
    """Return True if the chat template calls the clock."""
    return _CLOCK in str(getattr(tokenizer, "chat_template", ""))


def set_date(tokenizer: Any, time: str) -> None:
    """Let the chat template write this time, in ISO format, instead of the clock's, so that renderings stay equal."""
    if writes_date(tokenizer):
        clock = {_CLOCK: datetime.fromisoformat(time).strftime}
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **clock)


class Renderer:
    """Renders prompts with a tokenizer's chat template, and the schemas of tools if there are any.

    Raises ConfigError if the tokenizer has no template.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[dict[str, Any]] = ()) -> None:
        check_chat_template(tokenizer)
        self._tokenizer, self._tools = tokenizer, list(tools)
        # The marker of the first omitted text, by hash of the conversation's form; None if nothing is omitted.
        self._omitted: dict[int, str | None] = {}

    def render(self, messages: list[dict[str, Any]], place: str, tools: Sequence[dict[str, Any]] = ()) -> str:
        """Return the text of the prompt, up to where the model starts to write. `place` (file:line) is for errors.

        `tools` are the row's. Raises ConfigError if the template refuses the messages, or omits one of their texts.
        """
        text = self._apply_template(messages, place, tools, add_generation_prompt=True)
        if surrogate := find_surrogate(text):
            raise ConfigError(
                f"{place}: the rendered prompt has the lone surrogate {surrogate}, which is not a character; "
                "correct the chat template"
            )
        self._check_texts(messages, place, tools, text)
        return text

    def render_turn(
        self,
        messages: list[dict[str, Any]],
        before: str,
        closing: str,
        place: str,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """Return the text that sft trains as the last message, the assistant's: its content and `closing`.

        It follows `before`, the rendered prompt of the messages before it. It is the template's text if that continues
        `before` with the whole content. Otherwise the template removes a thought, or the opening tag of a thought that
        `before` already has, and the text is the content of the message.
        """
        *_, message = messages
        whole, content = self._apply_template(messages, place, tools), message["content"]
        self._check_texts(messages, place, tools)
        turn = whole.removeprefix(before) if whole.startswith(before) else None
        thought = message.get(THOUGHTS[0], "")
        if turn is not None and all(part.strip() in turn for part in (*_ANY_TAG.split(content), thought)):
            kept = turn.rpartition(closing)[0] if closing and closing in turn else turn.rstrip()
            return kept + closing
        opened = match.group() if (match := _OPEN_THOUGHT.search(before)) else ""
        has_more = thought or message.get("tool_calls")
        if has_more or (opened and not _END_OF_THOUGHT.search(content)):
            problem = "changes its thought or calls" if has_more else f"opens a thought ({opened.strip()})"
            raise ConfigError(
                f"{place}: message {len(messages) - 1} has no text to train on, because the chat template {problem};"
                " write the whole turn into its content, or remove the row"
            )
        if opened and content.lstrip().startswith(opened.strip()):
            content = content.lstrip().removeprefix(opened.strip()).lstrip()
        return content + closing

    def _apply_template(
        self,
        messages: list[dict[str, Any]],
        place: str,
        tools: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        options: Any = {"tools": [*tools] or self._tools or None, "add_generation_prompt": add_generation_prompt}
        try:
            return _apply(self._tokenizer, messages, **options)
        except Exception as error:  # templates can raise any exception: jinja2 errors, TypeError, ...
            with suppress(Exception):  # some templates, such as DeepSeek V3's, take arguments as JSON text only
                return _apply(self._tokenizer, _with_argument_texts(messages), **options)
            raise ConfigError(
                f"{place}: the chat template refuses the messages ({' '.join(str(error).split())}); "
                "correct the row, or leave data.system_prompt out if the template takes no system message"
            ) from None

    def _check_texts(
        self, messages: list[dict[str, Any]], place: str, tools: Sequence[dict[str, Any]], prompt: str | None = None
    ) -> None:
        """Raise ConfigError if the template omits a text of the prompt, or of the last message if there is no prompt.

        The actual text could be elsewhere in the prompt by chance. So the conversation is rendered with a marker as
        each text, once for all conversations of the same form.
        """
        (marked, marked_tools), places = mark_texts(messages, tools)
        first = len(messages) - 1 if prompt is None else -1
        form = hash(json.dumps([marked, len(tools), first]))
        if form not in self._omitted:
            try:
                text = self._apply_template(marked, place, marked_tools, add_generation_prompt=prompt is not None)
            except ConfigError:  # this template depends on the texts, and it accepted the texts of the row
                text = " ".join(places)
            wanted = (marker for marker, (number, *_) in places.items() if number >= first)
            self._omitted[form] = next((marker for marker in wanted if marker not in text), None)
        for marker, (number, field, value) in places.items():
            is_lost = prompt and field == "content" and not _holds_message(prompt, messages[number])
            if is_lost or marker == self._omitted[form]:
                where = f"message {number} (role {messages[number]['role']!r})" if number >= 0 else "the row"
                raise ConfigError(
                    f"{place}: the chat template leaves out {'text' if field == 'content' else field} of {where}:"
                    f" {short(value)}; correct the row or the template, or leave data.system_prompt out if it is the"
                    " system message"
                )


def _with_argument_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with arguments of calls as JSON text."""
    messages = copy.deepcopy(messages)
    for call in chain.from_iterable(message.get("tool_calls", ()) for message in messages):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return messages


def _holds_message(prompt: str, message: dict[str, Any]) -> bool:
    """Return whether a prompt contains a message's text, also as JSON with an equal value.

    Spaces at the ends of the text may be missing, and so may the thought of an earlier assistant turn.
    """
    text = message["content"]
    parts = [text]
    if message["role"] == "assistant":
        opened, closed = _THOUGHT.search(text), _END_OF_THOUGHT.search(text)
        is_half = closed and not (opened and opened.start() < closed.start())  # the template opened this thought
        parts = _THOUGHT.split(text[closed.end() :] if closed and is_half else text)
    return all(part.strip() in prompt for part in parts) or text.strip() in prompt or _holds_json(prompt, text)


def _holds_json(prompt: str, text: str) -> bool:
    """Return whether JSON in the prompt has the value of `text`, or is a string with this text."""
    wanted: list[Any] = [text, text.strip()]
    with suppress(ValueError, RecursionError):
        wanted.append(json.loads(text))
    scan = json.JSONDecoder().raw_decode
    position = 0
    while match := _JSON_START.search(prompt, position):
        position = match.start() + 1
        with suppress(ValueError, RecursionError):
            value, end = scan(prompt, match.start())
            position = position if isinstance(value, str) else end  # the quote may be a closing quote
            pending = [value]
            while pending:
                inner = pending.pop()
                if isinstance(inner, str | list | dict) and inner in wanted:
                    return True
                pending += inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else []
    return False


def find_prefill(tokenizer: Any) -> str:
    """Return the text that the chat template writes into the assistant's turn before the model; "" for most templates.

    Raises ConfigError if a template cannot render a question and its answer.
    """
    try:
        before_turn = _apply(tokenizer, [_QUESTION])
        generation_prompt = _apply(tokenizer, [_QUESTION], add_generation_prompt=True)
        if not generation_prompt.startswith(before_turn):
            return _open_thought(generation_prompt)
        # A template may write an empty thought into the last turn, and the generation prompt shares its opening tag.
        # But the template omits thoughts from earlier turns. So compare with both renderings; the shorter common part
        # is the header.
        answered = [_apply(tokenizer, [_QUESTION, _ANSWER]), _apply(tokenizer, [_QUESTION, _ANSWER, _QUESTION])]
    except Exception as error:  # templates raise any exception
        raise ConfigError(
            f"the chat template of {tokenizer.name_or_path!r} cannot render a question and its answer "
            f"({' '.join(str(error).split())}); correct chat_template in its tokenizer_config.json"
        ) from None
    opening = generation_prompt[len(before_turn) :]
    headers = [
        text[len(before_turn) :].partition(_MARKER)[0]
        for text in answered
        if text.startswith(before_turn) and _MARKER in text
    ]
    lengths = []
    for header in headers:
        shared = opening[: num_common(opening, header)]
        # Count whole tags only: "<think>" and "</think>" share nothing.
        open_bracket = shared.rfind("<")
        is_inside_tag = open_bracket > shared.rfind(">") and shared not in (opening, header)
        lengths.append(open_bracket if is_inside_tag else len(shared))
    return opening[min(lengths, default=len(opening)) :] or _open_thought(opening)


def find_turn_end(tokenizer: Any) -> str:
    """Return the text that the chat template writes after the content of the last assistant turn, such as
    "<|im_end|>\\n".

    Return "" if there is no template, or if it cannot render a question and its answer.
    """
    try:
        check_chat_template(tokenizer)
        return _apply(tokenizer, [_QUESTION, _ANSWER]).partition(_MARKER)[2]
    except Exception:  # templates can raise any exception; `find_prefill` reports it
        return ""


def find_closing(tokenizer: Any, stop_ids: Collection[int]) -> tuple[str, bool]:
    """Return the text that ends an assistant turn, up to the first stop token, and True if it has a stop token.

    The token may be the start of the next turn. Without a stop token it is the text of `find_turn_end`.
    """
    stops = [tokenizer.decode([token]) for token in stop_ids]
    for messages in ([_QUESTION, _ANSWER], [_QUESTION, _ANSWER, _QUESTION]):
        with suppress(Exception):  # templates raise any exception; `find_prefill` reports it
            end = _apply(tokenizer, messages).partition(_MARKER)[2]
            if places := [(end.index(stop), stop) for stop in stops if stop and stop in end]:
                place, stop = min(places)
                return end[:place] + stop, True
    return find_turn_end(tokenizer).rstrip(), False


def find_end_token(tokenizer: Any, stop_ids: Collection[int]) -> tuple[int | None, str]:
    """Return the token that ends an assistant turn, and a line for the user if it is no stop token, otherwise "".

    The token is None if the template ends a turn with ordinary text, or with nothing.
    """
    closing, has_stop = find_closing(tokenizer, stop_ids)
    last: int | None = ([None] + tokenizer(closing, add_special_tokens=False)["input_ids"])[-1]
    if has_stop:
        return last, ""
    if not closing:
        return None, (
            "the chat template ends a turn with no token, so a response ends only if the model learned to end it; add"
            " the model's token to the template"
        )
    token = last if last in {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder} else None
    return token, (
        f"the chat template ends a turn with {closing!r}, which no eos id of the model names; add its token"
        f"{'' if token is None else f' {token}'} to rollout.stop_token_ids of train, or to eos_token_id in"
        " generation_config.json"
    )


def _open_thought(opening: str) -> str:
    """Return the thought tag at the end of the text, for templates that open a thought in every assistant turn."""
    match = _OPEN_THOUGHT.search(opening)
    return match.group() if match else ""


def _apply(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = False,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert isinstance(text, str)
    return text


_MOST_SHOWN = 400  # maximum number of characters of the first row in the log


@dataclass(frozen=True)
class Segment:
    """Tokens up to the first trained turn, the tokens from there on, and the ranges (start, end) of trained ones."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    trained: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Demonstration(Prompt):
    """A row of sft. `text` is the prompt of its last turn, and `answer` has all trained texts."""

    segments: tuple[Segment, ...] = ()


def load_demonstrations(
    source: DataSource, config: DataConfig, tokenizer: Any, *, stop_ids: Collection[int], first_id: int = 0
) -> tuple[list[Demonstration], int, str]:
    """Return the rows of one set in order, the number of rows dropped as too long, and a line for the log.

    Raises ConfigError if the set is unreadable or empty, a row is bad, the chat template is missing, or all rows are
    too long.
    """
    renderer, (closing, _) = Renderer(tokenizer), find_closing(tokenizer, stop_ids)
    conversations = read_demonstrations(source, config)
    by_row = [_pieces_of(one, renderer, closing) for one in conversations]
    texts = [text for pieces_of_row in by_row for pieces in pieces_of_row for text in accumulate(pieces)]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    rows = []
    for one, pieces_of_row in zip(conversations, by_row, strict=True):
        segments = tuple(
            _segment(tokenizer, pieces, [next(encoded) for _ in pieces], one.place) for pieces in pieces_of_row
        )
        if max(segment.num_tokens for segment in segments) <= config.max_length:
            text = "".join(pieces_of_row[-1][:-1])
            answer = "".join(turn for pieces in pieces_of_row for turn in pieces[1::2])
            parts = (first_id + one.index, text, segments[-1].prompt_ids, answer)
            rows.append(Demonstration(*parts, digest=one.digest, segments=segments))
    num_too_long = len(conversations) - len(rows)
    if not rows:
        raise ConfigError(
            f"data.max_length={config.max_length}: must hold a row, but drops all {num_too_long} of {source.path};"
            " raise it"
        )
    all_segments = [segment for row in rows for segment in row.segments]
    num_trained = sum(end - start for segment in all_segments for start, end in segment.trained)
    first = "".join(f"\u00ab{text}\u00bb" if i % 2 else text for i, text in enumerate(by_row[0][0]))
    first = first.replace("\n", "\\n")
    first = first if len(first) <= _MOST_SHOWN else f"{first[:_MOST_SHOWN]}..."
    note = (
        f"{source.path}: {len(rows)} rows with {sum(segment.num_tokens for segment in all_segments):,} tokens,"
        f" {num_trained:,} of them trained{f', {num_too_long} dropped as too long' if num_too_long else ''}; the first"
        f" row, with trained text in \u00ab\u00bb: {first}"
    )
    return rows, num_too_long, note


def _pieces_of(one: Conversation, renderer: Renderer, closing: str) -> list[list[str]]:
    """Return the texts of each segment: in turn a context and the trained turn after it."""
    segments: list[list[str]] = []
    for number, message in enumerate(one.messages):
        if message["role"] == "assistant" and number >= one.num_given:
            before = renderer.render(one.messages[:number], one.place, one.tools)
            turn = renderer.render_turn(one.messages[: number + 1], before, closing, one.place, one.tools)
            known = "".join(segments[-1]) if segments else None
            if known is not None and before.startswith(known):
                segments[-1] += [before.removeprefix(known), turn]
            else:
                segments.append([before, turn])
    return segments


def _segment(tokenizer: Any, pieces: list[str], encoded: list[list[int]], place: str) -> Segment:
    """Return the tokens of the pieces. encoded[i] are the tokens of the text up to piece i.

    If a token would have text of two pieces, the second one is tokenised alone, because an engine continues the tokens
    of its prompt.
    """
    token_ids: list[int] = []
    cuts = [0]
    for piece, whole in zip(pieces, encoded, strict=True):
        if whole[: cuts[-1]] != token_ids:
            text = tokenizer.decode(whole)
            whole = [*token_ids, *tokenizer(piece, add_special_tokens=False)["input_ids"]]
            if tokenizer.decode(whole) != text:
                raise ConfigError(
                    f"{place}: the tokenizer cannot separate {piece[:60]!r} from the text before it; correct or remove"
                    " the row"
                )
        token_ids = whole
        cuts.append(len(whole))
    first = cuts[1]
    trained = tuple((start - first, end - first) for start, end in zip(cuts[1::2], cuts[2::2], strict=True))
    return Segment(tuple(token_ids[:first]), tuple(token_ids[first:]), trained)
