"""An endpoint like OpenAI's for each session, on loopback: /sessions/ID/v1/chat/completions, with a key per session.

Only `max_tokens`, `stop` and `stream` may be chosen. Other sampling parameters must be the run's or absent, because the
trainer computes log-probs at the run's temperature. A streamed answer is complete when its first event is sent.

An answer may have a key that OpenAI's has not: `invalid_tool_calls`, a list of {"text", "error"} for calls that cannot
be parsed. The agent should tell the model.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.sessions.messages import RequestError, well_formed_json
from grpo_mega.rollout.sessions.session import ChatRequest, Session, Turn

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


@dataclass(frozen=True)
class OpenSession:
    """A session that clients can reach."""

    session: Session
    is_repeated: bool = False  # its agent function starts for the second time
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def answer_id(self, turn: Turn) -> str:
        """Return the id of the answer with this turn."""
        return f"chatcmpl-{self.id}-{turn.request.number}"


class Gateway:
    """Runs in the event loop that calls `start`. `sampling` may be replaced between phases."""

    def __init__(
        self, tokenizer: Any, sampling: Sampling, sample: Callable[[OpenSession, Turn, ChatRequest], Awaitable[None]]
    ) -> None:
        """`sample` waits until a turn has its result. It raises RequestError if the session ends before."""
        self.sampling = self._training_sampling = sampling
        self._tokenizer, self._sample = tokenizer, sample
        self.sessions: dict[str, OpenSession] = {}  # open sessions by id
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._url = ""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
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

    def open(self, opened: OpenSession) -> OpenSession:
        self.sessions[opened.id] = opened
        return opened

    def end(self, session_id: str) -> OpenSession | None:
        """Refuse further requests of the session. Return None if it ended before."""
        if (opened := self.sessions.pop(session_id, None)) is not None:
            self._ended.append(session_id)
        return opened

    def url(self, opened: OpenSession) -> str:
        """Return the base url for a client, such as OpenAI(base_url=...)."""
        return f"{self._url}/sessions/{opened.id}/v1"

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        try:
            opened = self._find(request)
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
            async with opened.session.lock:
                turn = opened.session.turn_of(chat)
                if turn.result is None:
                    await self._sample(opened, turn, chat)
        except RequestError as error:
            return _refusal(error)
        head = {"id": opened.answer_id(turn), "created": int(time.time()), "model": MODEL}
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
        try:
            self._find(request)
        except RequestError as error:
            return _refusal(error)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo_mega"}
        return web.json_response({"object": "list", "data": [model]})

    def _find(self, request: web.Request) -> OpenSession:
        name = request.match_info["id"]
        opened = self.sessions.get(name)
        if opened is None:
            if name in self._ended:
                raise ended_error()
            raise RequestError(f"there is no session {name!r}", code="session_unknown", status=404)
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {opened.key}".encode()):
            raise RequestError("the API key is not the session's; use chat.api_key", code="invalid_api_key", status=401)
        return opened

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
        tools: list[dict[str, Any]] | None = None
        if (given := body.get("tools")) not in (None, []):
            functions = [
                tool.get("function") if isinstance(tool, dict) else None
                for tool in (given if isinstance(given, list) else [None])
            ]
            if not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
                raise RequestError('tools: must be a list of {"type": "function", "function": {"name": ...}}')
            tools = well_formed_json(given)
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
        return ChatRequest.read(body.get("messages"), tools, most, frozenset(stop_ids))


def ended_error() -> RequestError:
    return RequestError("the session has ended", code="session_ended", status=410)


def _refusal(error: RequestError) -> web.Response:
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
