"""The conversations of one engine: each sample is a session, and an agent function in a worker talks to its endpoint.

The endpoint runs in an event loop in a separate thread, for both engines. The engine starts
conversations, takes events from a queue, and answers the turns that are asked for.

A worker that died ends no sample: its conversation starts again, once. If that fails too, the sample has failed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sessions.calls import CallParser, Decode
from grpo_mega.rollout.sessions.chat import prompt_values
from grpo_mega.rollout.sessions.gateway import Gateway, OpenSession, ended_error
from grpo_mega.rollout.sessions.session import ChatRequest, Limits, Session, Turn
from grpo_mega.rollout.sessions.template import Template
from grpo_mega.rollout.sessions.turns import Asked, Ended, Failed, TurnRequest, TurnResult
from grpo_mega.types import FinishReason, Prompt

T = TypeVar("T")
AGENT = "agent"  # name of the score of an agent function that returns a number


class Workers(Protocol):
    """The processes that run the agent functions (agents.AgentWorkers)."""

    results: queue.SimpleQueue[Any]  # AgentResult for each session that ended by itself; None is ignored

    def start(self, session_id: str, base_url: str, api_key: str, prompt: dict[str, Any]) -> None: ...

    def kill(self, session_ids: Collection[str]) -> None: ...

    def close(self) -> None: ...


class Conversations(AbstractContextManager["Conversations"]):
    """All methods may be called from any thread, but `start`, `abort` and `close` from one at a time."""

    def __init__(
        self,
        tokenizer: Any,
        decode: Decode,
        sampling: Sampling,
        workers: Workers,
        *,
        max_turns: int,
        max_context: int,
        max_tokens: int,
        tool_format: str = "auto",
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Check the chat template, and open the endpoint. Raise ConfigError if the template cannot be used.

        `max_context`: maximum number of tokens that the engine accepts. `max_tokens`: maximum number of tokens that a
        micro-batch has for all segments of a sample. `warn` gets the first error of an agent.
        """
        self.events: queue.SimpleQueue[Asked | Ended | Failed] = queue.SimpleQueue()
        self._template = Template(tokenizer, sampling.stop_token_ids)
        self._parser = CallParser(self._template, decode, tool_format)
        self._workers, self._warn = workers, warn
        self._max_turns, self._max_context, self._max_tokens = max_turns, max_context, max_tokens
        self._waiting: dict[Any, list[asyncio.Future[TurnResult]]] = {}  # by turn
        self._gateway = Gateway(tokenizer, sampling, self._sample)
        self._has_warned = False
        self._loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="sessions", daemon=True),
            threading.Thread(target=self._forward_results, name="agent-results", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._run(self._gateway.start())

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sampling(self) -> Sampling:
        """The sampling of this phase, which an engine sets before it starts conversations."""
        return self._gateway.sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._gateway.sampling = sampling

    def start(self, prompt_index: int, sample_index: int, prompt: Prompt, step: int) -> None:
        """Start the agent function of a sample in a worker."""
        self._start((prompt_index, sample_index), prompt, step, is_repeated=False)

    def answer(self, request: TurnRequest, result: TurnResult) -> None:
        """Answer a turn. The answer is ignored if its conversation has ended."""
        self._loop.call_soon_threadsafe(self._resolve, request, result)

    def abort(self) -> None:
        """End all running conversations, and discard their events. Return when none runs."""

        async def end_all() -> list[str]:
            ids = list(self._gateway.sessions)
            for session_id in ids:
                self._end(session_id)
            self._waiting.clear()
            return ids

        self._workers.kill(self._run(end_all()))
        while True:
            try:
                self.events.get_nowait()
            except queue.Empty:
                return

    def close(self) -> None:
        """End all conversations, the workers and the endpoint. May be called twice."""
        if self._loop.is_closed():
            return
        self.abort()
        self._workers.close()
        self._run(self._gateway.close())
        self._workers.results.put(None)
        self._threads[1].join()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _start(self, key: tuple[int, int], prompt: Prompt, step: int, *, is_repeated: bool) -> None:
        sampling = self.sampling
        longest, stop_ids = sampling.max_response_length, sampling.stop_token_ids
        limits = Limits(self._max_turns, longest, self._max_context, stop_ids, self._max_tokens)
        session = Session(self._template, self._parser, key, prompt, step, limits)
        opened = self._gateway.open(OpenSession(session, is_repeated))
        self._workers.start(opened.id, self._gateway.url(opened), opened.key, prompt_values(prompt))

    def _forward_results(self) -> None:
        while (result := self._workers.results.get()) is not None:
            self._loop.call_soon_threadsafe(self._agent_ended, result)

    # The methods below run in the event loop.

    async def _sample(self, opened: OpenSession, turn: Turn, chat: ChatRequest) -> None:
        """Ask the engine for a turn, and wait for its result."""
        if opened.id not in self._gateway.sessions:
            raise ended_error()
        name = _name(turn.request)
        future: asyncio.Future[TurnResult] = self._loop.create_future()
        if name not in self._waiting:
            self.events.put(Asked(turn.request))
        self._waiting.setdefault(name, []).append(future)
        opened.session.record(turn, chat, await future)

    def _resolve(self, request: TurnRequest, result: TurnResult) -> None:
        for future in self._waiting.pop(_name(request), ()):
            if not future.done():
                future.set_result(result)

    def _end(self, session_id: str) -> OpenSession | None:
        """Refuse further requests of a session, also requests that wait for a turn. Return None if it ended before."""
        ended = self._gateway.end(session_id)
        for name, futures in self._waiting.items():
            if ended is not None and name[0] == ended.session.key:
                for future in futures:
                    if not future.done():
                        future.set_exception(ended_error())
        return ended

    def _agent_ended(self, result: Any) -> None:
        ended = self._end(result.session_id)
        if ended is None:
            return
        session = ended.session
        try:
            if result.kind == "died" and not ended.is_repeated:
                self._start(session.key, session.prompt, session.step, is_repeated=True)
            elif result.kind == "died":
                self.events.put(Failed(session.key[0], result.error or "the agent's worker died"))
            else:
                self.events.put(self._event_of(ended, result))
        except Exception as error:  # without an event the engine would wait for ever
            self.events.put(Failed(session.key[0], f"prompt {session.prompt.id}: {error!r}"))

    def _event_of(self, ended: OpenSession, result: Any) -> Ended:
        """Return the event of a conversation that ended. A limit leaves scoring to others, and an error scores 0."""
        session = ended.session
        for turn in session.turns:
            turn.reward = result.turn_rewards.get(ended.answer_id(turn))
        self._waiting = {name: futures for name, futures in self._waiting.items() if name[0] != session.key}
        limit: FinishReason | None = "deadline" if result.kind == "deadline" else session.reached_limit
        sample = session.to_sample(limit or "stop")
        if result.kind == "returned":
            value = {} if result.value is None else {AGENT: result.value}
            sample.scores = dict(result.value if isinstance(result.value, dict) else value)
        else:
            sample.verdicts = {AGENT: limit or "error"}
            sample.scores = {} if limit else {AGENT: 0.0}
        if result.kind == "raised" and not limit and not self._has_warned:
            self._has_warned = True
            self._warn(f"rollout.agent raised an error, so its sample scores 0: {result.error}")
        return Ended(session.key[0], sample)


def _name(request: TurnRequest) -> tuple[Any, ...]:
    """Return what identifies a turn. A conversation that starts again may ask for the same turn."""
    return request.key, request.context_ids, request.max_new_tokens, request.stop_token_ids
