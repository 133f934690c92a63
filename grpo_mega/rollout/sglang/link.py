"""The leader's hold on its server: the process, the session to it, and whether it is of use.

What fails is kept in `failure`, with the phase and the end of the server's log; from then on calls do nothing until `restart`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from grpo_mega.errors import EngineError
from grpo_mega.rollout.sglang.api import Api
from grpo_mega.rollout.sglang.client import Client
from grpo_mega.rollout.sglang.server import Server, ServerSettings

Call = Callable[[Api], Coroutine[Any, Any, Any]]
LOOK_S = 0.2  # between looks at whether the server still lives


@dataclass(frozen=True)
class Limits:
    max_concurrent: int  # sequences that the server decodes at once
    start_deadline_s: float
    stall_deadline_s: float  # without a sign of life, a server counts as hung
    phase_deadline_s: float = math.inf  # of one generation phase, whatever the signs of life


class ServerLink:
    def __init__(self, settings: ServerSettings, limits: Limits, *, is_seeded: bool) -> None:
        self._settings, self._limits, self._is_seeded = settings, limits, is_seeded
        self.failure: str | None = None
        self.server = Server(settings)
        self._client: Client | None = None
        self._api: Api | None = None

    @property
    def is_ready(self) -> bool:
        return self._client is not None

    @property
    def stall_deadline_s(self) -> float:
        return self._limits.stall_deadline_s

    @property
    def client(self) -> Client:
        assert self._client is not None, "the server was not waited for"
        return self._client

    def start(self) -> None:
        """Begins the start-up, which goes on in the background."""
        self.server.start()

    def wait_until_ready(self, on_wait: Callable[[float], None]) -> None:
        """Raises EngineError if the server does not come up."""
        self.server.wait_until_healthy(self._limits.start_deadline_s, on_wait)
        self._client = Client(self.server.url, num_connections=self._limits.max_concurrent, is_seeded=self._is_seeded)
        self._api = Api(self._client.session, self.server.url)

    def restart(self, on_wait: Callable[[float], None]) -> None:
        """A fresh server in place of the failed one; `failure` says so if it does not come up."""
        self.close()
        self.failure = None
        self.server = Server(self._settings)
        try:
            self.start()
            self.wait_until_ready(on_wait)
        except EngineError as error:
            self.fail(str(error))

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self._api = None
        self.server.stop()

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = f"{reason}; {self.server.tail()}"

    def submit(self, call: Call) -> Future[Any] | None:
        """Begins a call; None if the server has failed before."""
        if self.failure is not None or self._api is None:
            return None
        return self.client.start(call(self._api))

    def settle(self, phase: str, future: Future[Any] | None) -> Any:
        """The answer to a call; None, with `failure` set, if there is none or the server dies or stalls meanwhile."""
        until = time.monotonic() + self._limits.stall_deadline_s
        while future is not None and self.failure is None:
            try:
                return future.result(timeout=LOOK_S)
            except TimeoutError:
                if future.done():  # the call's own deadline
                    self.fail(f"{self.server.url} did not answer in time, {phase}")
                elif not self.server.is_alive():
                    self.fail(f"{self.server.url} died, {phase}")
                elif time.monotonic() > until:
                    future.cancel()
                    self.fail(f"{self.server.url} gave no answer for {self._limits.stall_deadline_s:.0f} s, {phase}")
            except Exception as error:  # whatever the session raises
                self.fail(f"{self.server.url} failed, {phase} ({error})")
        return None

    def attempt(self, phase: str, call: Call) -> Any:
        """`submit` and `settle`."""
        return self.settle(phase, self.submit(call))

    def check_alive(self, phase: str, heard: float, began: float) -> float:
        """When a server that was last heard of at `heard` was, having been asked if need be; sets `failure` where it is of no
        use any more. Times are time.monotonic's."""
        now, deadline = time.monotonic(), self._limits.stall_deadline_s
        if not self.server.is_alive():
            self.fail(f"{self.server.url} died, {phase}")
        elif now - began > self._limits.phase_deadline_s:
            self.fail(f"{self.server.url} is not done after {now - began:.0f} s, {phase}")
        elif now - heard > deadline:
            if self.attempt(f"{phase}, asked for its health", lambda api: api.is_healthy(deadline / 2)):
                return time.monotonic()
            self.fail(f"{self.server.url} hangs, {phase}: nothing for {now - heard:.0f} s, and not healthy")
        return heard
