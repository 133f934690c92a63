"""The session of one sample: a tree of messages with the tokens that the engine saw and sampled.

A request extends the deepest stored turn whose messages it repeats, and reuses the tokens of this turn. If no turn can
be extended, because the client or the template rewrote the history, a new segment starts: the conversation is rendered
as a whole, and nothing in it is trained but the turn that follows. Nothing is ever removed from the tree.

`TurnRequest`, `TurnResult` and the other messages pass between conversations and engines.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_mega.rollout.sessions.calls import CallParser
from grpo_mega.rollout.sessions.template import Message, RequestError, Template, Tools, clean, digest, digest_of
from grpo_mega.types import Context, FinishReason, Prompt, Sample, Span

Key = tuple[int, int]  # prompt index and sample index


@dataclass(frozen=True)
class Limits:
    """Limits of one sample. A request beyond them is refused, and the limit is the sample's finish reason."""

    max_turns: int
    max_response_length: int  # tokens of all turns, sampled and inserted
    max_context: int  # tokens of one segment, with its context
    stop_token_ids: frozenset[int]
    max_tokens: int = sys.maxsize  # tokens of all segments, with their contexts, because one micro-batch trains them


@dataclass(frozen=True)
class ChatRequest:
    """A request for a turn. Two requests with the same content have the same `path`, `max_tokens` and `stop_ids`."""

    messages: list[Message]
    tools: Tools
    max_tokens: int | None
    stop_ids: frozenset[int]  # in addition to the run's stop tokens
    paths: list[bytes]  # digest of each prefix of the messages, with the tools

    @classmethod
    def read(
        cls,
        messages: Any,
        tools: Tools = None,
        max_tokens: int | None = None,
        stop_ids: frozenset[int] = frozenset(),
    ) -> ChatRequest:
        """Check a client's messages. Raise RequestError."""
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages: must be a list of at least one message")
        cleaned = [clean(message, f"messages[{number}]") for number, message in enumerate(messages)]
        if cleaned[-1]["role"] == "assistant":
            raise RequestError("messages: must not end with an assistant message; end with what it must answer")
        paths = [digest_of(b"", tools or [])]
        for message in cleaned:
            paths.append(digest(paths[-1], message))
        return cls(cleaned, tools or None, max_tokens, stop_ids, paths[1:])


@dataclass
class Turn:
    """A turn that was asked for. `result` and `answer` are set once it was sampled."""

    request: TurnRequest
    messages: list[Message]
    parent: Turn | None  # the turn whose tokens it extends; None starts a segment
    num_inserted: int  # last tokens of the context, after the tokens of the parent
    is_cut_by_client: bool  # the client's max_tokens is its limit of tokens
    result: TurnResult | None = None
    answer: Message = field(default_factory=dict)  # the client gets this message
    finish_reason: str = ""  # "stop", "length" or "tool_calls", for the client
    reward: float | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.result.token_ids if self.result else []

    @property
    def text_ids(self) -> list[int]:
        """Return the tokens of the turn without the stop token."""
        has_stop = self.result is not None and self.result.finish_reason == "stop"
        return self.token_ids[:-1] if has_stop else self.token_ids

    @property
    def all_ids(self) -> tuple[int, ...]:
        return (*self.request.context_ids, *self.token_ids)


class Session:
    """One conversation of an agent, of the sample `key`."""

    def __init__(
        self,
        template: Template,
        parser: CallParser,
        key: Key,
        prompt: Prompt,
        step: int,
        limits: Limits,
        *,
        num_alone: int = 0,
    ) -> None:
        """`num_alone`: number of starts of the agent function without other samples in its worker."""
        self.id, self.api_key, self.num_alone = secrets.token_hex(8), secrets.token_urlsafe(24), num_alone
        self.turns: list[Turn] = []
        self.limit: FinishReason | None = None  # the limit that was reached
        self.lock = asyncio.Lock()  # held while a turn is sampled, so that limits do not depend on time
        self._template, self._parser, self._limits = template, parser, limits
        self.key, self.prompt, self.step = key, prompt, step
        self._answered: dict[Any, Turn] = {}  # by request
        self._by_path: dict[bytes, Turn] = {}  # by digest of the messages up to and with the answer
        self._num_tokens = 0
        self._num_computed = 0  # tokens of all segments, with their contexts

    def turn_of(self, chat: ChatRequest) -> Turn:
        """Return the turn of a request. It has a result if an equal request was answered before. Raise RequestError."""
        asked = (chat.paths[-1], chat.max_tokens, chat.stop_ids)
        if stored := self._answered.get(asked):
            return stored
        if self.limit is None and len(self.turns) >= self._limits.max_turns:
            self.limit = "turns"
        if self.limit is not None:
            raise _limit_error(self.limit)
        parent, tail = self._extension(chat)
        if parent is None:
            context = self._template.render(self.as_sampled(chat), chat.tools)
        else:
            context = (*parent.all_ids, *tail)
        room = min(
            self._limits.max_response_length - self._num_tokens - len(tail),
            self._limits.max_context - len(context),
            self._limits.max_tokens - self._num_computed - self._num_added(parent, len(context), len(tail)),
        )
        if room <= 0:
            self.limit = "length"
            raise _limit_error(self.limit)
        most = min(room, chat.max_tokens or room)
        stops = self._limits.stop_token_ids | chat.stop_ids
        request = TurnRequest(self.key, self.prompt, len(self.turns), context, most, stops, self.step)
        turn = Turn(request, chat.messages, parent, len(tail), most < room)
        self.turns.append(turn)
        self._answered[asked] = turn
        return turn

    def answer_id(self, turn: Turn) -> str:
        """Return the id of the answer with this turn."""
        return f"chatcmpl-{self.id}-{turn.request.number}"

    def record(self, turn: Turn, chat: ChatRequest, result: TurnResult) -> None:
        """Store the sampled tokens of a turn, and the message that the client gets."""
        assert turn.result is None and result.token_ids, "a turn is sampled once, and has a token"
        self._num_computed += self._num_added(turn.parent, len(turn.request.context_ids), turn.num_inserted)
        self._num_computed += len(result.token_ids)
        self._num_tokens += turn.num_inserted + len(result.token_ids)
        turn.result = result
        is_cut = result.finish_reason == "length"
        if is_cut and not turn.is_cut_by_client:
            self.limit = "length"
        parsed = self._parser.parse(turn.text_ids, chat.tools)
        turn.answer = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            turn.answer |= {"content": parsed.content or None, "tool_calls": parsed.calls}
        if parsed.invalid:
            turn.answer["invalid_tool_calls"] = parsed.invalid
        turn.finish_reason = "length" if is_cut else "tool_calls" if parsed.calls else "stop"
        self._by_path[digest(chat.paths[-1], clean(turn.answer, "answer"))] = turn

    @property
    def reached_limit(self) -> FinishReason | None:
        """Return the limit that ends the sample, if it ends now. The calls of the last possible turn have no answer."""
        is_cut = len(self.turns) == self._limits.max_turns and self.turns[-1].finish_reason == "tool_calls"
        return self.limit or ("turns" if is_cut else None)

    def _num_added(self, parent: Turn | None, num_context: int, num_inserted: int) -> int:
        """Return the number of tokens that a turn adds to the segments before its own tokens."""
        starts_segment = parent is None or any(turn.result and turn.parent is parent for turn in self.turns)
        return num_context if starts_segment else num_inserted

    def _extension(self, chat: ChatRequest) -> tuple[Turn | None, tuple[int, ...]]:
        """Return the deepest turn whose tokens the request extends, and the tokens after it; None, () if none does.

        A turn that ended by length has no stop token, so its tokens cannot be extended.
        """
        for number in range(len(chat.paths) - 1, 0, -1):
            turn = self._by_path.get(chat.paths[number - 1])
            if turn is None or turn.result is None or turn.result.finish_reason == "length":
                continue
            messages = self.as_sampled(chat)
            tail = self._template.extend(messages[:number], messages[number:], chat.tools, turn.token_ids[-1])
            return (None, ()) if tail is None else (turn, tail)
        return None, ()

    def as_sampled(self, chat: ChatRequest) -> list[Message]:
        """Return the messages to render. If the template does not render calls, they are text as it was sampled."""
        if self._template.shows_calls:
            return chat.messages
        messages = list(chat.messages)
        for number, message in enumerate(messages):
            if "tool_calls" in message:
                turn = self._by_path.get(chat.paths[number])
                text = self._parser.decode(turn.text_ids) if turn else self._parser.written(message)
                messages[number] = {"role": "assistant", "content": text}
        return messages

    def to_sample(self, finish_reason: FinishReason) -> Sample:
        """Return the sample of the turns that were sampled. Each segment becomes one row of training."""
        ids: list[int] = []
        logprobs: list[float] = []
        sampled: list[tuple[int, int]] = []
        contexts: list[Context] = []
        spans: list[Span] = []
        rewards: list[float | None] = []
        segments = self._segments()
        for segment in segments:
            first = segment[0].request.context_ids
            if ids or first != tuple(self.prompt.token_ids):
                contexts.append(Context(len(ids), first))
            for place, turn in enumerate(segment):
                assert turn.result is not None
                start = len(ids)
                inserted = (
                    turn.request.context_ids[len(turn.request.context_ids) - turn.num_inserted :] if place else ()
                )
                ids += [*inserted, *turn.result.token_ids]
                logprobs += [*[0.0] * len(inserted), *turn.result.logprobs]
                sampled.append((start + len(inserted), len(ids)))
                rewards.append(turn.reward)
                if spans and spans[-1].version == turn.result.version:
                    start = spans.pop().start
                spans.append(Span(turn.result.version, start, len(ids)))
        has_rewards = any(reward is not None for reward in rewards)
        last = segments[-1][-1] if segments else None
        return Sample(
            self.prompt,
            self.key[1],
            ids,
            logprobs,
            finish_reason,
            spans or [Span(self.step, 0, 0)],
            sampled=sampled,
            contexts=contexts,
            messages=[] if last is None else [*last.messages, clean(last.answer, "answer")],
            step_ends=[end - 1 for _, end in sampled] if has_rewards else [],
            step_rewards=[reward or 0.0 for reward in rewards] if has_rewards else [],
        )

    def _segments(self) -> list[list[Turn]]:
        """Return the sampled turns in chains, each turn an extension of the turn before it, by their first turns.

        Equal requests with another max_tokens or stop sample the same tokens first, because a turn's random stream
        depends on its context. Only the longest of these turns is trained. It gets the rewards of all.
        """
        segments: list[list[Turn]] = []
        by_context: dict[tuple[int, ...], list[Turn]] = {}
        for turn in self.turns:
            by_context.setdefault(turn.request.context_ids, []).insert(0, turn)
        for turn in self.turns:
            if turn.result is not None:
                ids, equal = turn.token_ids, by_context[turn.request.context_ids]
                whole = max((t for t in equal if t.token_ids[: len(ids)] == ids), key=lambda one: len(one.token_ids))
                if whole is not turn:
                    if turn.reward is not None:
                        whole.reward = (whole.reward or 0.0) + turn.reward
                    continue
                chain = next((chain for chain in segments if chain[-1] is turn.parent), None)
                if chain is None:
                    segments.append([turn])
                else:
                    chain.append(turn)
        return segments


def _limit_error(limit: str) -> RequestError:
    key = {"turns": "max_turns", "length": "max_response_length"}[limit]
    return RequestError(f"the sample has reached rollout.{key}; return from the agent function", code=key)


@dataclass(frozen=True)
class TurnRequest:
    """One assistant turn to sample after `context_ids`.

    The random stream of the turn depends on the run's seed, `step`, the prompt's id, the sample index and the CRC-32 of
    `context_ids`. So it depends neither on the order of turns nor on time.
    """

    key: Key
    prompt: Prompt
    number: int  # 0, 1, ... within the sample
    context_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    step: int  # the step in which the sample started; seeds its random stream


@dataclass(frozen=True)
class TurnResult:
    """The tokens of a sampled turn. With finish_reason "stop" the last token is a stop token of the request."""

    token_ids: list[int]
    logprobs: list[float]  # one per token, at the run's temperature
    finish_reason: Literal["stop", "length"]
    version: int  # version of the policy that sampled the tokens


@dataclass(frozen=True)
class Asked:
    """A conversation waits for this turn. Answer with Conversations.answer."""

    request: TurnRequest


@dataclass(frozen=True)
class Ended:
    """A conversation ended by itself or by a limit. The sample is complete."""

    prompt_index: int
    sample: Sample


@dataclass(frozen=True)
class Failed:
    """A conversation ended by an error of the infrastructure, not of its agent function."""

    prompt_index: int
    error: str
