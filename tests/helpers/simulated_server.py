"""A server without a model. In each step it decodes one token of every sequence. The length of each sample is given.

The trainer's engine uses it like a session of a real server, so the trainer's own code decides the order in which
samples start and how many are in flight.
"""

from __future__ import annotations

import heapq
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from grpo_mega.config import RolloutConfig
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.engine import RolloutRequest, Sampling
from grpo_mega.rollout.sglang.buckets import HostBuckets
from grpo_mega.rollout.sglang.client import Event
from grpo_mega.rollout.sglang.engine import SGLangEngine
from grpo_mega.rollout.sglang.server import EngineSettings
from grpo_mega.types import Group, Prompt, Sample, Span
from grpo_mega.weights.layout import ShardLayout

Lengths = Mapping[tuple[int, int], int]  # length of each sample, by (group key, sample index)


class SimulatedSession:
    """A session whose clock counts steps. A step takes the same time for any number of sequences; prefills take no
    time.
    """

    def __init__(self, lengths: Lengths, version: int = 0) -> None:
        self.now, self.version = 0, version
        self.begun_at: dict[tuple[int, int], int] = {}
        self.most_at_once = 0
        self.is_aborting = False
        self._lengths = lengths
        self._requests: list[tuple[int, list[Sample]]] = []  # samples in flight per request, by group key
        self._ends: list[tuple[int, int, int]] = []  # heap of (end time, group key, sample index)
        self._ready: list[Event] = []

    def generate(self, key: int, samples: Sequence[Sample], sampling: Sampling, step: int) -> None:
        self._requests.append((key, list(samples)))
        for sample in samples:
            self.begun_at[key, sample.index] = self.now
            heapq.heappush(
                self._ends, (self.now + self._lengths[key, sample.index] - sample.response_len, key, sample.index)
            )
        self.most_at_once = max(self.most_at_once, len(self._ends))

    def next_event(self, timeout: float) -> Event:
        if self._ready:
            return self._ready.pop(0)
        if not self._ends:
            raise queue.Empty
        return self._next()

    def _next(self) -> Event:
        self.now, key, index = heapq.heappop(self._ends)
        for of, samples in self._requests:
            for sample in samples:
                if (of, sample.index) == (key, index):
                    samples.remove(sample)
                    return Event(key, self._grown(key, sample, "length"))
        raise AssertionError(f"sample {index} of group {key} is not in flight")

    def _grown(self, key: int, sample: Sample, reason: Any) -> Sample:
        num = self.now - self.begun_at[key, sample.index]
        if not num:
            return sample
        span = Span(self.version, sample.response_len, sample.response_len + num)
        tokens, logprobs = [*sample.response_ids, *[7] * num], [*sample.rollout_logprobs, *[-1.0] * num]
        return replace(
            sample, response_ids=tokens, rollout_logprobs=logprobs, finish_reason=reason, spans=[*sample.spans, span]
        )

    def post(self, path: str, body: object) -> None:
        """Abort all requests. Samples that would end within two steps still end, after the first aborted event."""
        assert path == "/abort_request" and self.is_aborting
        last = self.now + 2
        while self._ends and self._ends[0][0] <= last:
            self._ready.append(self._next())
        aborted = [
            Event(key, aborted=tuple(self._grown(key, s, None) for s in samples))
            for key, samples in self._requests
            if samples
        ]
        self._ready = [*aborted[:1], *self._ready, *aborted[1:]]
        self._requests, self._ends = [], []

    def flush_cache_when_idle(self) -> None:
        assert not self._ends and not self._ready

    def start(self, result: object) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(result)
        return future


def simulate(
    session: SimulatedSession, request: RolloutRequest, slots: int, *, num_engines: int = 1
) -> dict[int, Group]:
    """Return the groups that the trainer's engine generates with this server. It has one of `num_engines` shares of
    them.
    """
    engine = engine_of(session, slots, num_engines=num_engines)
    groups = engine.generate(request)
    assert engine.failure is None, engine.failure
    return groups


def engine_of(session: SimulatedSession, slots: int, *, num_engines: int = 1, **limits: float) -> SGLangEngine:
    """Return the trainer's engine with this session. `limits` are deadlines of the rollout section."""
    server: Any = SimpleNamespace(url="", headers={}, is_alive=lambda: True, tail=lambda: "")
    deadlines: dict[str, Any] = {"stall_deadline_s": 60.0, "phase_deadline_s": 60.0, **limits}
    settings = EngineSettings(
        rollout=RolloutConfig(engine="sglang", max_concurrent=slots, **deadlines),
        model_path=Path(),
        dtype="float32",
        folder=Path(),
        context_length=2**30,
        device_type="cpu",
        world_size=num_engines,
        cores=(0,),
    )
    engine = SGLangEngine(settings, ShardLayout(((),)), Rendezvous(HashStore(), 0, 1), HostBuckets(), server)
    engine._session = session  # type: ignore[assignment]
    return engine


def fresh(prompts: Mapping[int, Prompt]) -> dict[int, Group]:
    return {key: Group(prompt, []) for key, prompt in prompts.items()}
