"""The leader's client of its server: starts and restarts it, calls it, and generates with it.

The first failure is stored in `failure`, with the phase and the end of the server's log. It is never raised, because other
ranks wait for this one. After a failure, calls do nothing until `restart`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any

from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import NO_EARLIER_GROUPS, OnSample, Sampling
from grpo_mega.rollout.schedule import Schedule
from grpo_mega.rollout.sglang.server import Server
from grpo_mega.rollout.sglang.session import Session
from grpo_mega.rollout.sglang.settings import EngineSettings
from grpo_mega.rollout.stop_condition import StopCondition
from grpo_mega.types import Group, Prompt, Sample

LOOK_S = 0.2  # interval of checks that the server is alive
STOP_LOOK_S = 0.05  # interval of checks of a stop condition


class Client:
    def __init__(self, settings: EngineSettings, server: Server | None = None) -> None:
        """Use the running `server`, or launch one without waiting for it. `wait_until_ready` waits."""
        self.failure: str | None = None
        self._settings, self._rollout = settings, settings.rollout
        self._session: Session | None = None
        self.server = server or Server(settings)
        if server is None:
            self.server.start()

    @property
    def session(self) -> Session:
        assert self._session is not None, "wait_until_ready was not called"
        return self._session

    def wait_until_ready(self) -> None:
        """Wait for the server's start. Raise EngineError if it fails. A second call does nothing."""
        if self._session is None:
            self.server.wait_until_healthy()
            self._session = Session(
                self.server.url,
                self.server.headers,
                num_connections=self._rollout.max_concurrent,
                is_seeded=self._settings.is_seeded,
                routers=self._settings.routers,
            )

    def restart(self) -> None:
        """Replace the failed server by a new one. Set `failure` if the new server does not start."""
        self.close()
        self.failure, self.server = None, Server(self._settings)
        try:
            self.server.start()
            self.wait_until_ready()
        except EngineError as error:
            self.fail(str(error))

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None
        self.server.stop()

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = f"{reason}; {self.server.tail()}"

    def post(self, phase: str, path: str, body: dict[str, Any] | None = None) -> None:
        """Call an endpoint and await its response."""
        self.await_response(phase, self.begin_post(path, body))

    def flush_cache_when_idle(self, phase: str) -> None:
        """Wait until the server is idle, then flush its cache."""
        self.await_response(phase, self._begin(lambda session: session.flush_cache_when_idle()))

    def begin_post(self, path: str, body: dict[str, Any] | None = None) -> Future[Any] | None:
        """Call an endpoint without waiting for the response. Return None if the server has failed before."""
        return self._begin(lambda session: session.post(path, body))

    def _begin(self, call: Callable[[Session], Coroutine[Any, Any, Any]]) -> Future[Any] | None:
        if self.failure is not None or self._session is None:
            return None
        return self._session.start(call(self._session))

    def await_response(self, phase: str, future: Future[Any] | None) -> Any:
        """Return the result of a call. If it fails, or the server dies or stalls meanwhile, set `failure` and return None."""
        until = time.monotonic() + self._rollout.stall_deadline_s
        while future is not None and self.failure is None:
            try:
                return future.result(timeout=LOOK_S)
            except TimeoutError:
                if future.done():  # the session's deadline for the call has passed
                    self.fail(f"{self.server.url} did not answer in time, {phase}")
                elif not self.server.is_alive():
                    self.fail(f"{self.server.url} died, {phase}")
                elif time.monotonic() > until:
                    future.cancel()
                    self.fail(f"{self.server.url} gave no answer for {self._rollout.stall_deadline_s:.0f} s, {phase}")
            except Exception as error:  # the session may raise any error
                self.fail(f"{self.server.url} failed, {phase} ({error})")
        return None

    def generate(
        self,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        step: int,
        *,
        next_number: Callable[[], int],
        schedule: Schedule,
        on_sample: OnSample,
        stop: StopCondition | None = None,
        earlier: Mapping[int, Group] = NO_EARLIER_GROUPS,
    ) -> dict[int, Group]:
        """Return the groups that this server finished, by key. If `stop` is met, also return its unfinished groups.

        All engines share a counter of prompts. This engine calls `next_number` for its next prompt while the schedule wants
        groups, so no engine is idle while prompts wait, and a slow engine takes fewer prompts. When `stop` is met, running
        samples are aborted, and the server is idle with an empty cache. If the server fails, even during the abort, its
        unfinished groups are missing, and their samples of this phase are lost.
        """
        phase, keys, has_more = f"generating in step {step}", list(prompts), True
        under_way, finished = dict[int, Group](), dict[int, Group]()
        started_at = heard = time.monotonic()

        def take(key: int, sample: Sample) -> None:
            schedule.ended(key, sample)
            group = under_way[key]
            group.samples.append(sample)
            on_sample(sample, group)
            if len(group.samples) == sampling.group_size:
                finished[key] = under_way.pop(key)
                if stop is not None:
                    stop.done(key)

        while self.failure is None:
            if stop is not None and stop.is_met():
                if self._abort(f"aborting stragglers in step {step}", schedule, take):
                    schedule.return_to(under_way)
                    finished |= under_way
                break
            while has_more and schedule.wants_group:
                number = next_number()
                has_more = number < len(keys)
                if has_more:
                    key = keys[number]
                    under_way[key] = schedule.add(key, prompts[key], earlier.get(key))
            for key, samples in schedule.take().items():
                self.session.generate(key, samples, sampling, step)
            if not under_way:
                break
            try:
                event = self.session.events.get(timeout=LOOK_S if stop is None else STOP_LOOK_S)
            except queue.Empty:
                heard = self._check_alive(phase, heard, started_at)
                continue
            heard = time.monotonic()
            if event.sample is not None:
                take(event.key, event.sample)
            else:
                self.fail(f"{phase}: {event.error}")
        return {key: Group(group.prompt, sorted(group.samples, key=lambda s: s.index)) for key, group in finished.items()}

    def _check_alive(self, phase: str, heard: float, started_at: float) -> float:
        """Check that the server is alive, and check its health if there was no event since `heard` for too long.

        Return the time when the server was last known to be healthy. Set `failure` if it is dead, hangs, or exceeds the phase's
        deadline. Times are from time.monotonic.
        """
        now, deadline = time.monotonic(), self._rollout.stall_deadline_s
        if not self.server.is_alive():
            self.fail(f"{self.server.url} died, {phase}")
        elif now - started_at > self._rollout.phase_deadline_s:
            self.fail(f"{self.server.url} is not done after {now - started_at:.0f} s, {phase}")
        elif now - heard > deadline:
            check = self._begin(lambda session: session.is_healthy(deadline / 2))
            if self.await_response(f"{phase}, asked for its health", check):
                return time.monotonic()
            self.fail(f"{self.server.url} hangs, {phase}: nothing for {now - heard:.0f} s, and not healthy")
        return heard

    def _abort(self, phase: str, schedule: Schedule, take: Callable[[int, Sample], None]) -> bool:
        """Abort the running samples and return them to the schedule with their tokens. Return False if the server fails."""
        started_at, session = time.monotonic(), self.session
        session.is_aborting = schedule.num_under_way > 0
        while schedule.num_under_way and self.failure is None:
            # Repeat the call, because a request may reach the server after an abort.
            self.post(phase, "/abort_request", {"abort_all": True})
            pause_ends = time.monotonic() + LOOK_S
            while schedule.num_under_way and (seconds := pause_ends - time.monotonic()) > 0:
                try:
                    event = session.events.get(timeout=seconds)
                except queue.Empty:
                    break
                if event.error is not None:
                    self.fail(f"{phase}: {event.error}")
                    break
                if event.sample is not None:
                    take(event.key, event.sample)
                else:
                    schedule.left_over(event.key, event.aborted or ())
            if schedule.num_under_way and time.monotonic() - started_at > self._rollout.stall_deadline_s:
                self.fail(f"{phase}: {schedule.num_under_way} samples do not end")
        if session.is_aborting:
            self.flush_cache_when_idle(phase)
        session.is_aborting = False
        return self.failure is None
