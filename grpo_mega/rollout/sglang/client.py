"""An HTTP session with one SGLang server: calls to its endpoints, and one event per sample that ends.

The session runs an event loop in a separate thread. Its owner submits samples and takes events from a queue, so rewards
and bookkeeping stay in the owner's thread. If a connection breaks, the session requests the missing samples again. It
never retries a rejected request, and retries nothing during an abort. A teacher's server, which the trainer does not
start, only returns log-probs.

SGLang 0.5.17, 0.5.21 and 0.5.23 differ. The session reads the server's endpoint list instead of a version number.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from grpo_mega.errors import ConfigError, EngineError
from grpo_mega.http_client import LoopThread
from grpo_mega.paths import parse_json
from grpo_mega.rollout.engine import Sampling
from grpo_mega.rollout.routes import RouterSizes, parsed
from grpo_mega.rollout.routes import with_routes_of as extended_routes
from grpo_mega.rollout.sglang.server_main import ADAPTER_KEY
from grpo_mega.types import Sample, Span

ATTEMPTS = 4
FIRST_PAUSE_S = 0.5  # pause before the second attempt; doubles each time
CONNECT_DEADLINE_S = 10.0
DEADLINE_S = 120.0  # deadline per call, except sample requests
FLUSH_PAUSE_S = 0.05  # pause before the next attempt to flush a busy server
LONGEST_LINE = 1 << 30  # bytes; a sample is one line
MOST_BYTES = 1 << 28  # limit for other answers; log-probs for a million tokens are smaller
MOST_BYTES_OF_INFO = 1 << 20  # limit for an answer from /server_info
MOST_BYTES_OF_ERROR = 1 << 16  # bytes read from the answer to a failed request
MAX_WORDS = 500  # characters quoted from a server's message in an error
SHOWN = 80  # characters quoted from any other answer in an error
TEACHER_CONNECTIONS = 64  # maximum concurrent requests per rank to a teacher
TEACHER_DEADLINE_S = 300.0  # deadline per request to a teacher
LEAST_LOGPROB, MOST_LOGPROB = -3.4028235e38, 1e-3  # float32 holds the least; the most is 0 with rounding
SPARE_CONNECTIONS = 4  # connections for calls that must not wait behind samples, such as health checks

# Before 0.5.21 these endpoints do not exist. From 0.5.21 on a server refuses an update without them.
OPTIONAL = {"/begin_weight_update", "/end_weight_update"}


class RefusedError(EngineError):
    """The server refused a request."""


@dataclass(frozen=True)
class Event:
    """A sample that ended, or a request's last event, with `error` or `aborted`."""

    prompt_index: int
    sample: Sample | None = None
    was_retracted: bool = False  # the server interrupted the sample because its KV cache was full
    error: str | None = None  # why this server cannot generate the samples
    aborted: tuple[Sample, ...] | None = None  # unfinished samples at the abort


class ServerClient(LoopThread):
    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        num_connections: int = 1,
        is_seeded: bool = False,
        routers: RouterSizes | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Open a session.

        `num_connections`: maximum number of concurrent requests. `is_seeded`: the server uses a seed per sample, so a
        request lists each sample separately. `routers`: the model's routers, if the server records their choices.
        """
        self.url = url
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.is_aborting = False  # the owner sets this while it aborts running samples
        self.adapter: str | None = None  # adapter that all samples must use
        self._is_seeded, self._routers, self._deadline_s = is_seeded, routers, deadline_s
        self._endpoints: set[str] | None = None
        super().__init__("sglang-session")

        async def open_http() -> aiohttp.ClientSession:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S)
            pool = aiohttp.TCPConnector(limit=num_connections + SPARE_CONNECTIONS)
            return aiohttp.ClientSession(connector=pool, headers=headers, timeout=timeout, read_bufsize=LONGEST_LINE)

        self._http = self.run(open_http())

    def close(self) -> None:
        """Cancel all requests and stop the thread."""
        if self.loop.is_closed():
            return

        async def cancel_all() -> None:
            tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.close()

        self.run(cancel_all())
        self.stop()

    async def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        """Call an endpoint. Raise EngineError if the server does not answer or refuses; the error quotes the server."""
        if path in OPTIONAL:
            if self._endpoints is None:
                self._endpoints = set(json.loads(await self._call("GET", "/openapi.json"))["paths"])
            if path not in self._endpoints:
                return
        answer = await self._call("POST", path, body or {})
        if _parsed(answer).get("success") is False:
            raise EngineError(f"{self.url}{path} was refused: {_words(answer)}")

    async def flush_cache_when_idle(self) -> None:
        """Wait until the scheduler is idle, then flush its cache. A busy scheduler refuses to flush."""
        while True:
            with contextlib.suppress(RefusedError):
                return await self.post("/flush_cache")
            await asyncio.sleep(FLUSH_PAUSE_S)

    async def is_healthy(self, deadline_s: float) -> bool:
        """Return True if the scheduler answers. It answers between two batches, whether it is busy, idle, paused or
        asleep.

        SGLang's health check generates tokens, which would end a sleeping server.
        """
        with contextlib.suppress(EngineError):
            await self._call("GET", "/server_info", deadline_s=deadline_s, most_bytes=MOST_BYTES_OF_INFO)
            return True
        return False

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        deadline_s: float | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> str:
        deadline_s = deadline_s or self._deadline_s
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._http.request(method, f"{self.url}{path}", json=body, allow_redirects=False) as response,
            ):
                text = await _text(response, most_bytes)
        except TimeoutError:
            raise EngineError(f"{self.url}{path} gave no answer for {deadline_s:.0f} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineError(f"{self.url}{path} cannot be reached ({error})") from None
        if response.status != 200:
            raise RefusedError(f"{self.url}{path} was refused ({response.status}): {_words(text)}")
        return text

    async def logprobs(self, token_ids: Sequence[int], num_last: int) -> list[float]:
        """Return the last tokens' log-probs [num_last] under the server's model, at temperature 1."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(token_ids) - num_last - 1,
        }
        for attempt in range(ATTEMPTS):
            try:
                text = await self._call("POST", "/generate", body)
                break
            except EngineError as error:
                if isinstance(error, RefusedError) or attempt == ATTEMPTS - 1:
                    raise
            await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
        try:
            entries = parse_json(text)["meta_info"]["input_token_logprobs"]
            last = entries[len(entries) - num_last :]
            # The server reports id 0 for the last token of the vocabulary, because its scheduler takes larger ids for
            # images.
            pairs = zip((entry[1] for entry in last), token_ids[len(token_ids) - num_last :], strict=True)
            if any(said not in (asked, 0) for said, asked in pairs):
                raise ValueError("log-probs of other tokens than requested")
            return checked_logprobs(entry[0] for entry in last)
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(
                f"{self.url}/generate answered {_words(text)[:SHOWN]!r}, no log-probs of the last {num_last} tokens"
                f" ({error}); see its log, or correct the url"
            ) from None

    def generate(
        self,
        prompt_index: int,
        samples: Sequence[Sample],
        sampling: Sampling,
        step: int,
        on_event: Callable[[Event], None] | None = None,
    ) -> Future[None]:
        """Start or resume a group's samples in one request. Return its future, which may be cancelled.

        Each sample that ends is an event. An event with `error` or `aborted` ends the request. With `on_event` the
        session's thread calls it with the events, and they do not enter the queue.
        """
        return self.start(self._generate(prompt_index, samples, sampling, step, on_event or self.events.put))

    def next_event(self, timeout: float) -> Event:
        """Return the next event. Raise queue.Empty if there is none within this time."""
        return self.events.get(timeout=timeout)

    async def _generate(
        self,
        prompt_index: int,
        samples: Sequence[Sample],
        sampling: Sampling,
        step: int,
        on_event: Callable[[Event], None],
    ) -> None:
        missing, pause = {sample.index: sample for sample in samples}, FIRST_PAUSE_S
        try:
            for attempt in range(1, ATTEMPTS + 1):
                if self.is_aborting:
                    break
                try:
                    requested = dict(enumerate(missing.values()))
                    body = request_body([*requested.values()], sampling, step, is_seeded=self._is_seeded)
                    body |= {} if self.adapter is None else {"lora_path": self.adapter}
                    async for answer in self._stream(body):
                        if not is_by_adapter(self.adapter, answer):
                            continue
                        sample = extended(requested[answer["index"]], answer, sampling, self._routers)
                        if not sample.is_finished:
                            missing[sample.index] = sample
                        elif missing.pop(sample.index, None):
                            was_retracted = bool(answer["meta_info"].get("num_retractions"))
                            on_event(Event(prompt_index, sample, was_retracted))
                    if not missing:
                        return
                    problem = f"its answer lacks {len(missing)} samples"
                except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
                    problem = repr(error)
                if attempt < ATTEMPTS and not self.is_aborting:
                    await asyncio.sleep(pause)
                    pause *= 2
            if not self.is_aborting:
                raise EngineError(f"prompt {samples[0].prompt.id} failed {ATTEMPTS} times at {self.url}: {problem}")
            on_event(Event(prompt_index, aborted=tuple(missing.values())))
        except EngineError as error:
            on_event(Event(prompt_index, error=str(error)))
        except Exception as error:  # without an event the owner would wait for ever
            problem = f"the answer of {self.url} for prompt {samples[0].prompt.id} cannot be used ({error!r})"
            on_event(Event(prompt_index, error=f"{problem}; see its log"))

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield an answer per sample that ended. Raise EngineError if another attempt cannot help."""
        async with self._http.post(f"{self.url}/generate", json=body, allow_redirects=False) as response:
            if response.status != 200:
                text = _words(await _text(response, MOST_BYTES_OF_ERROR))
                if 300 <= response.status < 500:
                    raise EngineError(f"the server at {self.url} refused a request ({response.status}: {text})")
                raise aiohttp.ClientPayloadError(f"{response.status}: {text}")
            async for line in response.content:
                if not line.startswith(b"data:") or line.strip() in (b"data:", b"data: [DONE]"):
                    continue
                answer = json.loads(line.removeprefix(b"data:"))
                if "error" in answer:
                    raise EngineError(f"the server at {self.url} could not generate: {answer['error']}")
                finish = answer["meta_info"]["finish_reason"]
                if finish is None:
                    continue
                if finish["type"] not in ("stop", "length") and not self.is_aborting:
                    raise aiohttp.ClientPayloadError(f"a sample ended by {finish}")
                yield {"index": 0, **answer}


def served_logprobs(name: str, url: str, samples: Sequence[Sample], on_answer: Callable[[], None]) -> list[list[float]]:
    """Return a teacher's log-probs for each sample's response tokens, at temperature 1. Raise EngineError if a request
    fails.
    """
    with contextlib.closing(
        ServerClient(url, {}, num_connections=TEACHER_CONNECTIONS, deadline_s=TEACHER_DEADLINE_S)
    ) as session:
        gate = asyncio.Semaphore(TEACHER_CONNECTIONS)

        async def ask(sample: Sample) -> list[float]:
            async with gate:
                values: list[float] = []
                for context, start, end in sample.segments():
                    values += await session.logprobs([*context, *sample.response_ids[start:end]], end - start)
                return values

        found = []
        try:
            for answer in [session.start(ask(sample)) for sample in samples]:
                found.append(answer.result())
                on_answer()
        except EngineError as error:
            raise EngineError(f"teachers.{name}.url={url}: {error}; continue with --resume") from None
        return found


def check_server(name: str, url: str) -> None:
    """Raise ConfigError if no SGLang server answers at a teacher's url."""
    with contextlib.closing(ServerClient(url, {})) as session:
        if not session.run(session.is_healthy(30.0)):
            raise ConfigError(
                f"teachers.{name}.url={url}: no SGLang server answers there; start it, or correct the url"
            )


def request_body(samples: Sequence[Sample], sampling: Sampling, step: int, *, is_seeded: bool) -> dict[str, Any]:
    """Return the request that starts or resumes these samples in a group."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_response_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": sorted(sampling.stop_token_ids),
    }
    body: dict[str, Any] = {"return_logprob": True, "stream": True}
    if sampling.with_routes:
        body["return_routed_experts"] = True
    prompt = samples[0].prompt
    if not is_seeded and not any(sample.response_len for sample in samples):
        return body | {"input_ids": list(prompt.token_ids), "sampling_params": params | {"n": len(samples)}}
    each = []
    for sample in samples:
        each.append(params | {"max_new_tokens": sampling.max_response_length - sample.response_len})
        if is_seeded:
            version = sample.first_version if sample.spans else step
            each[-1]["sampling_seed"] = sample_seed(sampling.seed, version, prompt.id, sample.index)
    contexts = [[*prompt.token_ids, *sample.response_ids] for sample in samples]
    return body | {"input_ids": contexts, "sampling_params": each}


def is_by_adapter(expected: str | None, answer: dict[str, Any]) -> bool:
    """Return True if the server computed all tokens in an answer using the adapter `expected`. None: using the base.

    Return False if it does not tell, because the request was aborted in its queue. Raise EngineError otherwise.
    """
    meta = answer["meta_info"]
    used = set(meta.get(ADAPTER_KEY, ()))
    if expected is None or not answer["output_ids"] or used == {expected}:
        return True
    if not used and meta["finish_reason"]["type"] == "abort":
        return False
    raise EngineError(
        f"a sample must use the adapter {expected}, but the server used {', '.join(sorted(used)) or 'none'}; set"
        " sync.lora=merged if that repeats"
    )


def sample_seed(*numbers: int) -> int:
    """Return a 63-bit seed that depends only on these numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def checked_logprobs(values: Iterable[Any]) -> list[float]:
    """Return a server's log-probs, without rounding above 0. Raise ValueError if a value cannot be a log-prob."""
    found = list(values)
    for value in found:
        if type(value) not in (int, float) or not LEAST_LOGPROB <= value <= MOST_LOGPROB:
            raise ValueError(f"{repr(value)[:SHOWN]} is no log-prob")
    return [min(float(value), 0.0) for value in found]


def extended(sample: Sample, answer: dict[str, Any], sampling: Sampling, routers: RouterSizes | None = None) -> Sample:
    """Append the tokens in the server's answer to the sample. It is unfinished if it was aborted before its end.

    Raise an error if a token, the length or a log-prob is impossible.

    If the server retracted the request for lack of cache, it recomputed tokens and reports the second computation's
    experts. The log-probs are from the first, so such a request's experts are unknown.
    """
    meta = answer["meta_info"]
    entries = meta.get("output_token_logprobs") or ()  # None if a request was aborted before its start
    tokens = [entry[1] for entry in entries]
    assert tokens == list(answer["output_ids"]), "the server's log-probs are of other tokens than its response"
    start, end = sample.response_len, sample.response_len + len(tokens)
    reason = meta["finish_reason"]["type"]
    is_known = all(type(token) is int and 0 <= token < sampling.vocab_size for token in tokens)
    assert is_known, "a token id is not in the model's vocabulary"
    assert end <= sampling.max_response_length and (end or reason == "abort"), f"{end} tokens end by {reason}"
    if reason == "abort":
        has_stopped = bool(tokens) and tokens[-1] in sampling.stop_token_ids
        reason = "stop" if has_stopped else "length" if end == sampling.max_response_length else None
    version = int(meta["weight_version"]) if str(meta["weight_version"]).isdigit() else -1
    routes = sample.routes
    if sampling.with_routes and routers and tokens:
        num_routed = len(sample.prompt.token_ids) + end - 1
        is_known = "routed_experts" in meta and not meta.get("num_retractions")
        experts = parsed(meta["routed_experts"], routers, num_routed) if is_known else routers.not_known(num_routed)
        routes = extended_routes(routes, experts)
    return replace(
        sample,
        routes=routes,
        response_ids=[*sample.response_ids, *tokens],
        rollout_logprobs=[*sample.rollout_logprobs, *checked_logprobs(entry[0] for entry in entries)],
        finish_reason=reason,
        spans=[*sample.spans, Span(version, start, end)] if tokens else sample.spans,
    )


async def _text(response: aiohttp.ClientResponse, most_bytes: int) -> str:
    """Return an answer's body, or the start of a refusal. Raise EngineError if the answer is too long."""
    is_refusal = response.status != 200
    most_bytes = MOST_BYTES_OF_ERROR if is_refusal else most_bytes
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most_bytes:
            response.close()
            if is_refusal:
                break
            raise EngineError(f"{response.url} answered more than {most_bytes >> 20} MiB; is it an SGLang server?")
    return bytes(body[:most_bytes]).decode(errors="replace")


def _words(text: str) -> str:
    """Return the message in a server's answer, on one line."""
    parsed = _parsed(text)
    error = parsed.get("error", parsed)
    message = error.get("message", text) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_WORDS]


def _parsed(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        parsed = parse_json(text)
        if isinstance(parsed, dict):
            return parsed
    return {}
