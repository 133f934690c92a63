"""The endpoints of a server besides sampling, and what differs between SGLang 0.5.17, 0.5.21 and 0.5.23.

What a server can do is asked of the server itself (its list of endpoints), not of a version number. Every call has a deadline,
and raises EngineError with the server's own words where it refuses, and with the path where it does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp

from grpo_mega.errors import EngineError

DEADLINE_S = 120.0
PAUSE_S = 0.05  # before a server that is not idle yet is asked again
MAX_WORDS = 500  # characters of a server's answer in an error

# From 0.5.21 on an update has a beginning and an end, and is refused without them; before, these endpoints do not exist.
OPTIONAL = {"/begin_weight_update", "/end_weight_update"}


class RefusedError(EngineError):
    """The server answered, and does not do what it was asked."""


class Api:
    def __init__(self, session: aiohttp.ClientSession, url: str, deadline_s: float = DEADLINE_S) -> None:
        self._session, self._url, self._deadline_s = session, url, deadline_s
        self._endpoints: set[str] | None = None

    async def begin_update(self) -> None:
        await self._post("/begin_weight_update", {})

    async def load(self, payloads: list[str], load_format: str, version: str | None, flush: bool) -> None:
        """`payloads`: for each tensor-parallel process a pickled list of (name, tensor) in base64.

        `load_format` is the dotted path of the function that gets them there. With `version` the server says from then on
        that its samples are of that version. `flush` forgets cached prefixes, as nothing may run meanwhile.
        """
        body: dict[str, Any] = {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": flush}
        await self._post("/update_weights_from_tensor", body if version is None else body | {"weight_version": version})

    async def end_update(self) -> None:
        await self._post("/end_weight_update", {})

    async def release(self, tags: list[str]) -> None:
        """Gives back the memory of "weights" or "kv_cache", with what is in it. Only when idle: else the server ends itself."""
        await self._post("/release_memory_occupation", {"tags": tags})

    async def resume(self, tags: list[str]) -> None:
        """Takes that memory again; what it holds is undefined."""
        await self._post("/resume_memory_occupation", {"tags": tags})

    async def flush_cache(self) -> None:
        await self._post("/flush_cache", {})

    async def flush_cache_when_idle(self) -> None:
        """As soon as the scheduler has nothing under way any more; until then it refuses."""
        while True:
            with contextlib.suppress(RefusedError):
                return await self.flush_cache()
            await asyncio.sleep(PAUSE_S)

    async def abort_all(self) -> None:
        """Ends all samples under way, with what they have so far."""
        await self._post("/abort_request", {"abort_all": True})

    async def pause(self) -> None:
        """As `abort_all`, and new ones wait for `unpause`."""
        await self._post("/pause_generation", {"mode": "abort"})

    async def unpause(self) -> None:
        await self._post("/continue_generation", {})

    async def server_info(self) -> dict[str, Any]:
        """Its arguments and state; the state comes from the scheduler, between two of its batches."""
        info = json.loads(await self._call("GET", "/server_info", None, self._deadline_s))
        assert isinstance(info, dict)
        return info

    async def is_healthy(self, deadline_s: float) -> bool:
        """Whether the scheduler answers: busy, idle, paused or asleep, but not hung or gone.

        SGLang's own health check would have it generate, which while it sleeps would end it.
        """
        with contextlib.suppress(EngineError):
            await self._call("GET", "/server_info", None, deadline_s)
            return True
        return False

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        if path in OPTIONAL and path not in await self._known_endpoints():
            return
        answer = await self._call("POST", path, body, self._deadline_s)
        if _parsed(answer).get("success") is False:
            raise EngineError(f"{self._url}{path} was refused: {_words(answer)}")

    async def _known_endpoints(self) -> set[str]:
        if self._endpoints is None:
            self._endpoints = set(json.loads(await self._call("GET", "/openapi.json", None, self._deadline_s))["paths"])
        return self._endpoints

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> str:
        try:
            async with asyncio.timeout(deadline_s), self._session.request(method, f"{self._url}{path}", json=body) as response:
                text = await response.text()
        except TimeoutError:
            raise EngineError(f"{self._url}{path} gave no answer for {deadline_s:.0f} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineError(f"{self._url}{path} cannot be reached ({error})") from None
        if response.status != 200:
            raise RefusedError(f"{self._url}{path} was refused ({response.status}): {_words(text)}")
        return text


def _words(text: str) -> str:
    """The message in an answer, on one line."""
    parsed = _parsed(text)
    error = parsed.get("error", parsed)
    message = error.get("message", text) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:MAX_WORDS]


def _parsed(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    return {}
