"""Sample conversation turns on an SGLang server. An engine uses `Turns` in place of its session.

A conversation starts and ends like a sample. In between the session samples each turn that the conversation requests,
using one request per turn, and answers in the session's thread. Between turns a conversation holds no server state.
This is not mistaken for a hang, because the server still answers health checks.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from grpo_mega.rollout.engine import RolloutRequest, Sampling, token_checksum
from grpo_mega.rollout.sessions.session import Asked, Ended, Failed, Key, TurnRequest, TurnResult
from grpo_mega.rollout.sglang.client import Event, ServerClient, sample_seed
from grpo_mega.types import Sample

if TYPE_CHECKING:
    from grpo_mega.rollout.sessions.conversations import Conversations


@contextmanager
def samples_of(request: RolloutRequest, session: ServerClient) -> Iterator[ServerClient | Turns]:
    """Yield the sample generator for a request: the session itself, or conversations using the session's turns.

    At the end no conversation runs.
    """
    if request.conversations is None:
        yield session
        return
    turns = Turns(session, request.conversations, request.sampling)
    try:
        yield turns
    finally:
        turns.end()


class Turns:
    def __init__(self, session: ServerClient, conversations: Conversations, sampling: Sampling) -> None:
        self._session, self._conversations = session, conversations
        self._sampling = conversations.sampling = sampling
        self._running: dict[Key, Sample] = {}  # samples in running conversations
        self._retracted: set[Key] = set()  # conversations with a turn that the server interrupted
        # The session's thread answers turns, so this lock protects the fields below.
        self._lock = threading.Condition()
        self._in_flight: dict[int, tuple[Key, Future[None]]] = {}  # requests to the server, by number
        self._numbers = itertools.count()

    def generate(self, prompt_index: int, samples: Sequence[Sample], sampling: Sampling, step: int) -> None:
        """Start these samples' conversations."""
        for sample in samples:
            self._running[prompt_index, sample.index] = sample
            self._conversations.start(prompt_index, sample.index, sample.prompt, step)

    def next_event(self, timeout: float) -> Event:
        """Return the next conversation that ends. Raise queue.Empty if there is none within this time.

        While the session is aborting, conversations must have been aborted too, and each is an event once the server
        has ended all turns.
        """
        until = time.monotonic() + timeout
        while not (self._session.is_aborting and self._running):
            event = self._conversations.events.get(timeout=max(0.0, until - time.monotonic()))
            match event:
                case Asked(request):
                    self._sample(request)
                case Ended(prompt_index, sample):
                    return self._ended((prompt_index, sample.index), sample)
                case Failed(prompt_index, error):
                    return Event(prompt_index, error=error)
        with self._lock:
            if not self._lock.wait_for(lambda: not self._in_flight, timeout):
                raise queue.Empty
        (prompt_index, _), sample = self._running.popitem()
        return Event(prompt_index, aborted=(sample,))

    def end(self) -> None:
        """End running conversations after a failure. The session's later answers are ignored."""
        with self._lock:
            self._in_flight.clear()
        if self._running:
            self._conversations.abort()

    def _sample(self, request: TurnRequest) -> None:
        """Request a turn as if it was a sample whose prompt is the turn's context."""
        sample = Sample(replace(request.prompt, token_ids=request.context_ids), request.key[1], [], [], None)
        sampling = replace(
            self._sampling,
            max_response_length=request.max_new_tokens,
            stop_token_ids=request.stop_token_ids,
            seed=sample_seed(self._sampling.seed, token_checksum(request.context_ids)),
        )
        with self._lock:
            number = next(self._numbers)
            on_event = partial(self._answer, number, request)
            future = self._session.generate(request.key[0], [sample], sampling, request.step, on_event)
            self._in_flight[number] = request.key, future

    def _answer(self, number: int, request: TurnRequest, event: Event) -> None:
        """Answer a turn, or report the server's error. The session's thread calls it."""
        with self._lock:
            if self._in_flight.pop(number, None) is None:
                return
            self._lock.notify_all()
            if event.was_retracted:
                self._retracted.add(request.key)
            if event.error is not None:
                self._conversations.events.put(Failed(request.key[0], event.error))
            if (sample := event.sample) is not None:
                reason: Literal["stop", "length"] = "stop" if sample.finish_reason == "stop" else "length"
                ids, logprobs = list(sample.response_ids), list(sample.rollout_logprobs)
                self._conversations.answer(request, TurnResult(ids, logprobs, reason, sample.policy_version))

    def _ended(self, key: Key, sample: Sample) -> Event:
        """Return the event for a conversation that ended. Give up a turn that it did not wait for."""
        del self._running[key]
        with self._lock:
            for number, (other, future) in list(self._in_flight.items()):
                if other == key:
                    del self._in_flight[number]
                    future.cancel()  # closes the connection, so the server ends the request
        return Event(key[0], sample, was_retracted=key in self._retracted)
