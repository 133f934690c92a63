"""Sampling from one SGLang server: token ids in, token ids and log-probs out, one event for each sample that ends.

The session lives on an event loop in a thread of its own; its owner hands in groups and takes events from a queue, so that
rewards and bookkeeping stay in the owner's thread. A connection that breaks is tried again, for the samples that are missing
only; what the server refuses is not, and nothing is once the phase is told to end.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp

from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import Sampling
from grpo_mega.types import Prompt, Sample

T = TypeVar("T")

ATTEMPTS = 4
FIRST_PAUSE_S = 0.5  # before the second attempt; doubles each time
CONNECT_DEADLINE_S = 10.0
SPARE_CONNECTIONS = 4  # for other calls, such as for its health, which may not wait behind samples


@dataclass(frozen=True)
class Ended:
    """A sample that ended; or, with `error`, a group that cannot be had from this server."""

    key: int  # of the prompt
    sample: Sample | None
    error: str | None = None


@dataclass(frozen=True)
class Aborted:
    """No more samples of a group will come, as was asked."""

    key: int
    lengths: tuple[int, ...]  # tokens so far of those that had not ended


class Client:
    def __init__(self, url: str, *, num_connections: int, is_seeded: bool) -> None:
        """`num_connections`: groups sampled at once. `is_seeded`: the server draws each sample from a seed of its own, which
        needs a request that names them all."""
        self.url = url
        self.events: queue.SimpleQueue[Ended | Aborted] = queue.SimpleQueue()
        self.is_ending = False  # groups under way are being aborted; set and reset by the owner
        self._is_seeded = is_seeded
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-client", daemon=True)
        self._thread.start()
        self.session = self.run(self._open(num_connections))

    async def _open(self, num_connections: int) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_DEADLINE_S)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=num_connections + SPARE_CONNECTIONS), timeout=timeout)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine on the session's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result()

    def close(self) -> None:
        """Gives up whatever is under way."""
        if self._loop.is_closed():
            return
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.session.close()

    def sample(self, key: int, prompt: Prompt, sampling: Sampling, step: int) -> None:
        """Asks for a group; its samples come as events, group_size of them or, as the last, one with an error."""
        self.start(self._sample(key, prompt, sampling, step))

    async def _sample(self, key: int, prompt: Prompt, sampling: Sampling, step: int) -> None:
        try:
            await self._sample_or_raise(key, prompt, sampling, step)
        except EngineError as error:
            self.events.put(Ended(key, None, str(error)))
        except Exception as error:  # an answer that is not as expected; unsaid, its group would be waited for without end
            self.events.put(Ended(key, None, f"prompt {prompt.id} at {self.url}: {error!r}"))

    async def _sample_or_raise(self, key: int, prompt: Prompt, sampling: Sampling, step: int) -> None:
        missing = list(range(sampling.group_size))
        lengths: list[int] = []  # of the samples that were aborted
        pause = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            if self.is_ending:
                break
            try:
                body = request_body(prompt, sampling, missing, step, is_seeded=self._is_seeded)
                asked = tuple(missing)
                async for event in self._stream(body):
                    index = asked[event["index"]]
                    if event["meta_info"]["finish_reason"]["type"] == "abort":
                        lengths.append(int(event["meta_info"].get("completion_tokens", 0)))
                    elif index in missing:
                        self.events.put(Ended(key, sample_of(event, prompt, index)))
                        missing.remove(index)
                if not missing:
                    return
                problem = f"its answer lacks {len(missing)} samples"
            except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
                problem = repr(error)
            if attempt < ATTEMPTS and not self.is_ending:
                await asyncio.sleep(pause)
                pause *= 2
        if self.is_ending:
            self.events.put(Aborted(key, tuple(lengths)))
            return
        raise EngineError(f"prompt {prompt.id} failed {ATTEMPTS} times at {self.url}: {problem}")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of samples that ended. Raises EngineError where trying again cannot help."""
        async with self.session.post(f"{self.url}/generate", json=body) as response:
            if response.status != 200:
                text = " ".join((await response.text()).split())[:500]
                if 400 <= response.status < 500:
                    raise EngineError(f"the server at {self.url} refused a request ({response.status}: {text})")
                raise aiohttp.ClientPayloadError(f"{response.status}: {text}")
            async for text in _data_lines(response.content):
                event = json.loads(text)
                if "error" in event:
                    raise EngineError(f"the server at {self.url} could not sample: {event['error']}")
                finish = event["meta_info"]["finish_reason"]
                if finish is None:
                    continue
                if finish["type"] not in ("stop", "length") and not self.is_ending:
                    raise aiohttp.ClientPayloadError(f"a sample ended by {finish}")
                yield {"index": 0, **event}


async def _data_lines(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """The data of server-sent events, however long: a StreamReader's own lines may not be."""
    pending: list[bytes] = []
    async for chunk in content.iter_any():
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            text = (b"".join(pending) + line).strip()
            pending = []
            if text.startswith(b"data:") and text != b"data: [DONE]":
                yield text.removeprefix(b"data:").decode()
        pending.append(rest)


def request_body(prompt: Prompt, sampling: Sampling, indices: list[int], step: int, *, is_seeded: bool) -> dict[str, Any]:
    """The request for the samples of a prompt with these indices."""
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_response_length,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": sorted(sampling.stop_token_ids),
    }
    body: dict[str, Any] = {"return_logprob": True, "stream": True}
    if is_seeded:
        seeds = [sample_seed(sampling.seed, step, prompt.id, index) for index in indices]
        return body | {
            "input_ids": [list(prompt.token_ids)] * len(indices),
            "sampling_params": [params | {"sampling_seed": seed} for seed in seeds],
        }
    return body | {"input_ids": list(prompt.token_ids), "sampling_params": params | {"n": len(indices)}}


def sample_seed(seed: int, step: int, prompt_id: int, index: int) -> int:
    """63 bits that depend on these four numbers only."""
    digest = hashlib.blake2b(repr((seed, step, prompt_id, index)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_of(event: dict[str, Any], prompt: Prompt, index: int) -> Sample:
    meta = event["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    response_ids = [entry[1] for entry in meta["output_token_logprobs"]]
    assert response_ids == event["output_ids"], "the server's log-probs are of other tokens than its response"
    return Sample(
        prompt=prompt,
        index=index,
        response_ids=response_ids,
        rollout_logprobs=logprobs,
        finish_reason=meta["finish_reason"]["type"],
        policy_version=int(meta["weight_version"]) if str(meta["weight_version"]).isdigit() else -1,
    )
