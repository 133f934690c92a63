"""The conversations of one engine: each sample is a session, and an agent function in a worker talks to its endpoint.

The endpoint runs in an event loop in a separate thread, for both engines. The engine starts conversations,
takes events from a queue, and answers the turns that are asked for.

A worker that died ends no sample: its conversations start again, fewer in each worker. A sample that fails twice alone
in a worker has failed, and scores like an error.

The endpoint is like OpenAI's, on loopback: /sessions/ID/v1/chat/completions, with a key per session. Only `max_tokens`,
`stop` and `stream` may be chosen. Other sampling parameters must be the run's or absent, because the trainer computes
log-probs at the run's temperature. A streamed answer is complete when its first event is sent.

An answer may have a key that OpenAI's has not: `invalid_tool_calls`, a list of {"text", "error"} for calls that cannot
be parsed. The agent should tell the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from grpo_mega.data.messages import MessageError, read_tools
from grpo_mega.http_client import LoopThread
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sessions.agent_job import AgentResult, agent_prompt
from grpo_mega.rollout.sessions.agents import ANY, SPARE_WORKERS, AgentWorkers
from grpo_mega.rollout.sessions.calls import CallParser, Decode
from grpo_mega.rollout.sessions.session import (
    Asked,
    ChatRequest,
    Ended,
    Failed,
    Limits,
    Session,
    Turn,
    TurnRequest,
    TurnResult,
)
from grpo_mega.rollout.sessions.template import RequestError, Template, well_formed_json
from grpo_mega.types import FinishReason, Prompt

MAX_ALONE = 2  # starts of a sample without others in its worker
AGENT = "agent"  # name of the score of an agent function that returns a number


class Conversations(AbstractContextManager["Conversations"]):
    """All methods may be called from any thread, but `start`, `abort` and `close` from one at a time."""

    def __init__(
        self,
        tokenizer: Any,
        decode: Decode,
        sampling: Sampling,
        workers: AgentWorkers,
        *,
        max_turns: int,
        max_context: int,
        max_tokens: int,
        tool_format: str = "auto",
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Check the chat template, and open the endpoint. Raise ConfigError if the template cannot be used.

        `max_context`: maximum number of tokens that the engine accepts. `max_tokens`: maximum number of tokens that a
        micro-batch has for all segments of a sample. `warn` gets the first error of an agent, and why samples first
        start again.
        """
        self.events: queue.SimpleQueue[Asked | Ended | Failed] = queue.SimpleQueue()
        self._template = Template(tokenizer, sampling.stop_token_ids)
        self._parser = CallParser(self._template, decode, tool_format)
        self._workers, self._warn = workers, warn
        self._max_turns, self._max_context, self._max_tokens = max_turns, max_context, max_tokens
        self._waiting: dict[Any, list[asyncio.Future[TurnResult]]] = {}  # by turn
        self._gateway = Gateway(tokenizer, sampling, self._sample)
        self._warned_of: set[str] = set()  # kinds of results, and "again"
        self._thread = LoopThread("sessions")
        self._loop = self._thread.loop
        self._forwarding = threading.Thread(target=self._forward_results, name="agent-results", daemon=True)
        self._forwarding.start()
        self._thread.run(self._gateway.start())

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sampling(self) -> Sampling:
        """The sampling of this phase, which an engine sets before it starts conversations."""
        return self._gateway.sampling

    @sampling.setter
    def sampling(self, sampling: Sampling) -> None:
        self._gateway.sampling = sampling

    def start(
        self, prompt_index: int, sample_index: int, prompt: Prompt, step: int, most: int = ANY, num_alone: int = 0
    ) -> None:
        """Start the agent function of a sample in a worker.

        `most`: number of samples that may share the worker. `num_alone`: number of earlier starts without others.
        """
        sampling = self.sampling
        longest, stop_ids = sampling.max_response_length, sampling.stop_token_ids
        limits = Limits(self._max_turns, longest, self._max_context, stop_ids, self._max_tokens)
        key = prompt_index, sample_index
        session = Session(self._template, self._parser, key, prompt, step, limits, num_alone=num_alone + (most == 1))
        self._gateway.sessions[session.id] = session
        self._workers.start(session.id, self._gateway.url(session), session.api_key, agent_prompt(prompt), most)

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

        self._workers.kill(self._thread.run(end_all()))
        with contextlib.suppress(queue.Empty):
            while True:
                self.events.get_nowait()

    def close(self) -> None:
        """End all conversations, the workers and the endpoint. May be called twice."""
        if self._loop.is_closed():
            return
        self.abort()
        self._workers.close()
        self._thread.run(self._gateway.close())
        self._workers.results.put(None)
        self._forwarding.join()
        self._thread.stop()

    def _forward_results(self) -> None:
        while (result := self._workers.results.get()) is not None:
            self._loop.call_soon_threadsafe(self._agent_ended, result)

    # The methods below run in the event loop.

    async def _sample(self, session: Session, turn: Turn, chat: ChatRequest) -> None:
        """Ask the engine for a turn, and wait for its result."""
        if session.id not in self._gateway.sessions:
            raise ended_error()
        name = _name(turn.request)
        future: asyncio.Future[TurnResult] = self._loop.create_future()
        if name not in self._waiting:
            self.events.put(Asked(turn.request))
        self._waiting.setdefault(name, []).append(future)
        session.record(turn, chat, await future)

    def _resolve(self, request: TurnRequest, result: TurnResult) -> None:
        for future in self._waiting.pop(_name(request), ()):
            if not future.done():
                future.set_result(result)

    def _end(self, session_id: str) -> Session | None:
        """Refuse further requests of a session, also requests that wait for a turn. Return None if it ended before."""
        ended = self._gateway.end(session_id)
        for name, futures in self._waiting.items():
            if ended is not None and name[0] == ended.key:
                for future in futures:
                    if not future.done():
                        future.set_exception(ended_error())
        return ended

    def _agent_ended(self, result: AgentResult) -> None:
        session = self._end(result.session_id)
        if session is None:
            return
        try:
            if result.kind == "died" and session.num_alone < MAX_ALONE:
                most = max(1, result.num_sharing // SPARE_WORKERS)
                self.start(*session.key, session.prompt, session.step, most, session.num_alone)
                self._warn_once("again", f": samples start again, fewer in a worker, which takes time: {result.error}")
            else:
                self.events.put(self._event_of(session, result))
        except Exception as error:  # without an event the engine would wait for ever
            self.events.put(Failed(session.key[0], f"prompt {session.prompt.id}: {error!r}"))

    def _event_of(self, session: Session, result: AgentResult) -> Ended:
        """Return the event of a conversation that ended. A limit leaves scoring to others, and an error scores 0."""
        for turn in session.turns:
            turn.reward = result.turn_rewards.get(session.answer_id(turn))
        self._waiting = {name: futures for name, futures in self._waiting.items() if name[0] != session.key}
        limit: FinishReason | None = "deadline" if result.kind == "deadline" else session.reached_limit
        sample = session.to_sample(limit or "stop")
        if result.kind == "returned":
            if result.value is not None:
                sample.scores = dict(result.value if isinstance(result.value, dict) else {AGENT: result.value})
        elif limit and result.kind != "died":
            sample.verdicts, sample.scores = {AGENT: limit}, {}
        else:
            sample.verdicts, sample.scores = {AGENT: "error"}, {AGENT: 0.0}
            what = "raised an error" if result.kind == "raised" else "failed twice"
            self._warn_once(result.kind, f" {what}, so its sample scores 0: {result.error}")
        return Ended(session.key[0], sample)

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned_of:
            self._warned_of.add(kind)
            self._warn(f"rollout.agent{text}")


def _name(request: TurnRequest) -> tuple[Any, ...]:
    """Return what identifies a turn. A conversation that starts again may ask for the same turn."""
    return request.key, request.context_ids, request.max_new_tokens, request.stop_token_ids


MAX_BODY_BYTES = 1 << 28  # limit for a request
MAX_ENDED = 10_000  # ended sessions that are known, for a better error
MODEL = "policy"
_READ = {"messages", "tools", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options"}
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_OF_RUN = ("temperature", "top_p", "top_k")
# Parameters that may be given with a value that changes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}


class Gateway:
    """Runs in the event loop that calls `start`. `sampling` may be replaced between phases."""

    def __init__(
        self, tokenizer: Any, sampling: Sampling, sample: Callable[[Session, Turn, ChatRequest], Awaitable[None]]
    ) -> None:
        """`sample` waits until a turn has its result. It raises RequestError if the session ends before."""
        self.sampling = self._training_sampling = sampling
        self._tokenizer, self._sample = tokenizer, sample
        self.sessions: dict[str, Session] = {}  # open sessions by id
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._url = ""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_with_refusals])
        app.router.add_post("/sessions/{id}/v1/chat/completions", self._chat)
        app.router.add_get("/sessions/{id}/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._url = f"http://{host}:{port}"

    async def close(self) -> None:
        await self._runner.cleanup()

    def end(self, session_id: str) -> Session | None:
        """Refuse further requests of the session. Return None if it ended before."""
        if (session := self.sessions.pop(session_id, None)) is not None:
            self._ended.append(session_id)
        return session

    def url(self, session: Session) -> str:
        """Return the base url for a client, such as OpenAI(base_url=...)."""
        return f"{self._url}/sessions/{session.id}/v1"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._find(request)
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON ({error})") from None
        except web.HTTPRequestEntityTooLarge:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES >> 20} MiB", status=413) from None
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        try:
            chat = self._read(body)
        except RecursionError:
            raise RequestError("the body is nested too deeply") from None
        async with session.lock:
            turn = session.turn_of(chat)
            if turn.result is None:
                await self._sample(session, turn, chat)
        head = {"id": session.answer_id(turn), "created": int(time.time()), "model": MODEL}
        if not body.get("stream"):
            choice = {"index": 0, "message": turn.answer, "logprobs": None, "finish_reason": turn.finish_reason}
            return web.json_response(head | {"object": "chat.completion", "choices": [choice], "usage": _usage(turn)})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with contextlib.suppress(ConnectionError):  # the client is gone, and may ask again
            await response.prepare(request)
            for chunk in _chunks(turn, with_usage=bool((body.get("stream_options") or {}).get("include_usage"))):
                await response.write(f"data: {json.dumps(head | chunk)}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._find(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo_mega"}
        return web.json_response({"object": "list", "data": [model]})

    def _find(self, request: web.Request) -> Session:
        name = request.match_info["id"]
        session = self.sessions.get(name)
        if session is None:
            if name in self._ended:
                raise ended_error()
            raise RequestError(f"there is no session {name!r}", code="session_unknown", status=404)
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {session.api_key}".encode()):
            raise RequestError("the API key is not the session's; use chat.api_key", code="invalid_api_key", status=401)
        return session

    def _read(self, body: dict[str, Any]) -> ChatRequest:
        """Return the request of a body. Raise RequestError for a parameter that cannot be honoured."""
        for name, value in body.items():
            if name in _READ or name in _IGNORED or value is None:
                continue
            if name in _OF_RUN:
                # An agent may name the temperature of training in evaluation too, which is greedy.
                known = {getattr(one, name) for one in (self._training_sampling, self.sampling)}
                if value not in known and not (name == "top_k" and value == -1 and 0 in known):
                    raise RequestError(
                        f"{name}={value!r}: must be rollout.{name}={getattr(self._training_sampling, name)}, because"
                        " the trainer computes log-probs of that distribution; leave it out",
                        code="unsupported_parameter",
                    )
            elif value not in _NEUTRAL.get(name, ()) and (name, value, body.get("tools")) != (
                "tool_choice",
                "none",
                None,
            ):
                raise RequestError(
                    f"{name}={value!r:.80}: is not supported; leave it out", code="unsupported_parameter"
                )
        if not isinstance(body.get("stream_options") or {}, dict):
            raise RequestError("stream_options: must be an object")
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise RequestError(f"max_tokens={most!r}: must be a number of at least 1")
        try:
            tools = read_tools(body.get("tools"))
        except MessageError as error:
            raise RequestError(f"tools{error}") from None
        stop = body.get("stop")
        texts = [stop] if isinstance(stop, str) else stop or []
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise RequestError("stop: must be a text or a list of texts")
        stop_ids: set[int] = set()
        for text in map(well_formed_json, texts):
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(tokens) != 1:
                raise RequestError(
                    f"stop={text!r}: must be one token of the model, because generation stops at tokens; leave it out",
                    code="unsupported_parameter",
                )
            stop_ids.add(tokens[0])
        return ChatRequest.read(body.get("messages"), well_formed_json(tools), most, frozenset(stop_ids))


def ended_error() -> RequestError:
    return RequestError("the session has ended", code="session_ended", status=410)


@web.middleware
async def _with_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a RequestError as OpenAI's endpoint does."""
    try:
        return await handler(request)
    except RequestError as error:
        body = {"message": str(error), "type": "invalid_request_error", "param": None, "code": error.code}
        return web.json_response({"error": body}, status=error.status)


def _usage(turn: Turn) -> dict[str, int]:
    prompt, completion = len(turn.request.context_ids), len(turn.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _chunks(turn: Turn, *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """Yield the answer in two chunks: the message, then the reason of the end."""
    delta = dict(turn.answer)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(delta["tool_calls"])]
    for part, reason in ((delta, None), ({}, turn.finish_reason)):
        choice = {"index": 0, "delta": part, "logprobs": None, "finish_reason": reason}
        yield {"object": "chat.completion.chunk", "choices": [choice]}
    if with_usage:
        yield {"object": "chat.completion.chunk", "choices": [], "usage": _usage(turn)}
