"""The engine inside each rank's process: the transformers model with a KV cache, one replica per rank.

It needs no GPU and no server and works for every family that transformers supports. It also verifies the weight
mapping, because its forward pass is not this project's code. Prompts are decoded in batches with at most
`max_concurrent` sequences, and finished sequences leave the batch. A phase that is stopped early ends between two
tokens and discards the cache with the batch. Conversation turns join a running batch. Single responses do not, because
the last bits in a sample's log-probs would then depend on the lengths of earlier samples.

`TurnLoop` samples conversation turns: one batch, which turns join and leave between two decoding steps. The turns in
the batch must not depend on time, so that a resumed run repeats them. The clock counts decoding steps. A conversation
must request its next turn within a fixed number of steps after its last turn. Otherwise the engine waits for it, at
most LATE_S seconds. After that the engine continues without this conversation, and its next turn joins when it asks, so
a slow tool does not delay other conversations any further. After each wait without an answer the next wait is half as
long, so a phase loses at most 2 * LATE_S seconds.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.errors import EngineError
from grpo_mega.rollout.embedded.decoder import Cached, Decoder, Start, uniforms
from grpo_mega.rollout.embedded.model import RouteRecorder, checkpoint_tensors, make_model
from grpo_mega.rollout.engine import Engine, RolloutRequest, Sampling, Schedule, schedule_of, token_checksum
from grpo_mega.rollout.routes import RouterSizes, with_routes_of
from grpo_mega.rollout.sessions.session import Asked, Ended, Failed, Key, TurnRequest, TurnResult
from grpo_mega.types import FinishReason, Group, Sample, Span
from grpo_mega.weights.apply import Bucket, Entry, mismatched_blocks, mismatched_tensors, write_entries
from grpo_mega.weights.layout import hf_shards
from grpo_mega.weights.spec import Family, ModelShape

if TYPE_CHECKING:
    from grpo_mega.rollout.sessions.conversations import Conversations


class EmbeddedEngine(Engine):
    """An engine without a server. A failure ends the rank, unless it is a conversation's failure. `sleep` frees no
    memory, so policy and engine must fit together.
    """

    def __init__(
        self,
        hf_config: Any,
        family: Family,
        shape: ModelShape,
        dtype: torch.dtype,
        device: Device,
        max_concurrent: int,
        *,
        rank: int,
        world_size: int,
        verify: bool,
        quantise: bool = False,
    ) -> None:
        """`verify`: compare checksums after each sync. `quantise`: linear layers store dequantised FP8 block values."""
        super().__init__(hf_shards(family, shape, world_size, quantise=quantise))
        self.device = device.torch_device
        self.max_concurrent = max_concurrent
        self._rank, self._world_size, self._verify = rank, world_size, verify
        self._model = make_model(hf_config, shape, dtype, self.device)
        self._recorder = RouteRecorder(self._model)
        self._routers = RouterSizes.of(shape, hf_config) if shape.num_experts else None
        self._tensors = checkpoint_tensors(self._model, family, shape)
        self._received: list[Entry] = []
        self._problems: list[str] = []

    def start_update(self) -> list[str]:
        self._received, self._problems = [], []
        return sorted(set(self._tensors) ^ set(self.shard_layout.rank_shards(self._rank)))

    def load(self, bucket: Bucket) -> None:
        write_entries(bucket.entries, bucket.values, self._tensors, bucket.dtype)
        if self._verify:
            self._received += bucket.entries
            self._problems += mismatched_blocks(bucket.entries, bucket.values, self._tensors)

    def end_update(self, version: int) -> list[str]:
        problems = self._problems + mismatched_tensors(self._received, self._tensors)
        if not problems:
            self.version = version
        return problems

    def restart(self, failed: Collection[int]) -> None:
        if self._rank in failed:
            self.failure = None

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the model's weights by checkpoint name."""
        return self._tensors

    @torch.inference_mode()
    def generate(self, request: RolloutRequest) -> dict[int, Group]:
        """Generate every world_size-th group. `stop`'s clock counts this rank's decoding steps across all batches."""
        sampling, stop = request.sampling, request.stop
        mine = list(request.groups)[self._rank :: self._world_size]
        if stop is None:
            # Batches of prompts of similar length need less padding. With `stop` there is no sorting, because the last
            # batches may never start, and they must not always have the longest prompts.
            mine.sort(key=lambda prompt_index: len(request.groups[prompt_index].prompt.token_ids))
        per_batch = self.max_concurrent
        if not sampling.longest_first:  # batches of whole groups run each prompt once
            per_batch = max(1, per_batch // sampling.group_size) * sampling.group_size
        schedule = schedule_of(request, per_batch, len(mine))
        for prompt_index in mine:
            schedule.add(prompt_index)
        if request.conversations is not None:
            self._converse(request.conversations, request, schedule, per_batch)
            return schedule.complete_groups() if self.failure else schedule.finish()
        clock = 0
        while (stop is None or not stop.is_met(clock)) and (taken := schedule.take()):
            batch = [(prompt_index, sample) for prompt_index, samples in taken.items() for sample in samples]
            if stop is not None:
                stop.start_clocks |= {(prompt_index, sample.index): clock for prompt_index, sample in batch}
            clock = self._generate_batch(batch, request, schedule, clock)
        return schedule.finish()

    def _converse(
        self, conversations: Conversations, request: RolloutRequest, schedule: Schedule, num_slots: int
    ) -> None:
        """Run the schedule's conversations. Set `failure` if a conversation fails."""
        self._recorder.is_on = False
        num_slots = min(num_slots, schedule.num_waiting)
        decoder = Decoder(self._model, request.sampling)
        try:
            TurnLoop(decoder, num_slots, conversations, request, schedule, self.version).run()
        except EngineError as error:
            self.failure = f"a conversation in step {request.step} failed: {error}"

    def _generate_batch(
        self, batch: Sequence[tuple[int, Sample]], request: RolloutRequest, schedule: Schedule, clock: int
    ) -> int:
        """Decode until all samples end or the phase stops. Return the clock. Unfinished samples go back to the
        schedule.
        """
        samples, sampling, stop = [sample for _, sample in batch], request.sampling, request.stop
        routers = self._routers if sampling.with_routes else None
        self._recorder.is_on = routers is not None
        decoder = Decoder(self._model, sampling, self._recorder if routers else None)
        for is_continued in (False, True):
            starts = {
                row: _start_of(sample, sampling, request.step)
                for row, sample in enumerate(samples)
                if (sample.response_len > 0) == is_continued
            }
            if starts:
                decoder.add(starts)

        def extended(row: int, reason: FinishReason | None) -> tuple[int, Sample]:
            prompt_index, sample = batch[row]
            tokens, logprobs = decoder.found(row)
            routes = sample.routes
            if routers:
                routes = with_routes_of(routes, decoder.experts(row).numpy().astype(routers.dtype))
            return prompt_index, replace(
                sample,
                response_ids=[*sample.response_ids, *tokens],
                rollout_logprobs=[*sample.rollout_logprobs, *logprobs],
                finish_reason=reason,
                spans=[*sample.spans, Span(self.version, sample.response_len, sample.response_len + len(tokens))],
                routes=routes,
            )

        while decoder.is_running:
            clock += 1
            for row, reason in decoder.sample():
                schedule.ended(*extended(row, reason), clock)
            if stop is not None and decoder.is_running and stop.is_met(clock):
                for row in decoder.live_slots:
                    prompt_index, sample = extended(row, None)
                    schedule.left_over(prompt_index, [sample])
                break
            decoder.advance()
        return clock


def _start_of(sample: Sample, sampling: Sampling, step: int) -> Start:
    """Return the start of a sample that begins or resumes in `step`."""
    stream, prompt = None, sample.prompt
    if sampling.temperature > 0:
        version = sample.first_version if sample.spans else step
        stream = uniforms(sampling.seed, version, prompt.id, sample.index, length=sampling.max_response_length)
        stream = stream[sample.response_len :]
    context = (*prompt.token_ids, *sample.response_ids) if sample.response_len else prompt.token_ids
    return Start(context, stream, sampling.max_response_length - sample.response_len, sampling.stop_token_ids)


JOIN_EVERY = 8  # turns join the batch when the clock is a multiple of this
LEAST_STEPS = 4  # minimum decoding steps between two turns in a conversation
LATE_S = 10.0  # seconds that the engine waits for a conversation
LOOK_S = 0.05  # interval between stop checks while all conversations are late


class TurnLoop:
    """Runs a request's conversations on one rank."""

    def __init__(
        self,
        decoder: Decoder,
        num_slots: int,
        conversations: Conversations,
        request: RolloutRequest,
        schedule: Schedule,
        version: int,
    ) -> None:
        """`num_slots`: maximum number of concurrent turns. `version`: the decoder's policy version."""
        self._decoder, self._num_slots, self._conversations, self._request = decoder, num_slots, conversations, request
        self._schedule, self._version = schedule, version
        self._clock = 0
        self._samples: dict[Key, Sample] = {}  # samples in running conversations
        # Clock until which a conversation may think; none while its turn is decoded, or if the engine no longer waits
        # for the conversation, because it is late.
        self._due: dict[Key, int] = {}
        self._asked: list[TurnRequest] = []  # turns that have not joined yet
        self._ended: dict[Key, Sample] = {}  # conversations that have not been reported yet
        self._turns: dict[int, TurnRequest] = {}  # turns in the batch, by slot
        self._caches: dict[Key, tuple[tuple[int, ...], Cached | None]] = {}  # last turns, with their tokens
        self._patience = LATE_S

    def run(self) -> None:
        """Run until all conversations ended or the phase stops. Raise EngineError if a conversation failed."""
        try:
            self._conversations.sampling = self._request.sampling
            self._start_samples()
            while self._samples and not self._is_stopped:
                if not self._decoder.is_running:  # nothing to decode until the next conversation is due
                    self._clock = max(_next_join(self._clock), min(self._due.values(), default=0))
                if self._clock % JOIN_EVERY == 0:
                    self._wait_for_due()
                    self._report_ended()
                    self._join_asked()
                if self._decoder.is_running:
                    self._step()
        finally:
            self._abort()

    @property
    def _is_stopped(self) -> bool:
        # If all conversations are late, the clock stands still, but the phase may have ended on other ranks.
        clock = sys.maxsize if self._are_all_late else self._clock
        return self._request.stop is not None and self._request.stop.is_met(clock)

    @property
    def _are_all_late(self) -> bool:
        return (
            not self._due
            and not self._decoder.is_running
            and not any(map(self._is_due, (*self._asked_keys, *self._ended)))
        )

    @property
    def _asked_keys(self) -> list[Key]:
        return [request.key for request in self._asked]

    def _is_due(self, key: Key) -> bool:
        return self._due.get(key, 0) <= self._clock

    def _start_samples(self) -> None:
        """Start conversations while there is room."""
        for prompt_index, samples in self._schedule.take().items():
            for sample in samples:
                key = prompt_index, sample.index
                self._samples[key], self._due[key] = sample, _next_join(self._clock + LEAST_STEPS)
                self._conversations.start(prompt_index, sample.index, sample.prompt, self._request.step)

    def _wait_for_due(self) -> None:
        """Receive events until each conversation that is due has one or is late. Wait longer if all are late."""
        until = time.monotonic() + self._patience
        while missing := self._missing():
            if not self._receive(until - time.monotonic()):
                self._due = {key: clock for key, clock in self._due.items() if key not in missing}
                self._patience /= 2
        while self._are_all_late and not self._is_stopped:
            self._receive(LOOK_S)
        while self._receive(0):
            pass

    def _missing(self) -> set[Key]:
        """Return the conversations that are due, not late, and neither ask for a turn nor ended."""
        return set(filter(self._is_due, self._due)) - {*self._ended, *self._asked_keys}

    def _receive(self, seconds: float) -> bool:
        """Receive an event within this time. Return False if there is none. Raise EngineError if it is a failure."""
        try:
            event = self._conversations.events.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        match event:
            case Asked(request):
                self._asked.append(request)
            case Ended(prompt_index, sample):
                self._ended[prompt_index, sample.index] = sample
            case Failed(error=error):
                raise EngineError(error)
        return True

    def _report_ended(self) -> None:
        """Report the conversations that ended, ordered by key, and start others in their place."""
        for key in sorted(filter(self._is_due, self._ended)):
            self._due.pop(key, None)
            del self._samples[key]
            self._cancel(key)
            self._schedule.ended(key[0], self._ended.pop(key), self._clock)
        self._start_samples()

    def _cancel(self, key: Key) -> None:
        """Forget a conversation's cache, and turns that it did not wait for, because of its deadline."""
        self._caches.pop(key, None)
        self._asked = [request for request in self._asked if request.key != key]
        slots = [slot for slot, request in self._turns.items() if request.key == key]
        self._decoder.cancel(slots)
        for slot in slots:
            del self._turns[slot]

    def _join_asked(self) -> None:
        """Let the turns that are due join the batch, ordered by length."""
        free = [slot for slot in range(self._num_slots) if slot not in self._turns]
        due = sorted((request for request in self._asked if self._is_due(request.key)), key=lambda request: request.key)
        contexts = {request.context_ids: request.context_ids for request in due}  # equal contexts share a prefill
        due = sorted(due[: len(free)], key=lambda request: (len(request.context_ids), request.context_ids))
        starts = dict[int, Start]()
        for request, slot in zip(due, free, strict=False):
            self._asked.remove(request)
            self._due.pop(request.key, None)
            self._turns[slot] = request
            starts[slot] = self._start_of(request, contexts[request.context_ids])
        if starts:
            self._decoder.join(starts)

    def _start_of(self, request: TurnRequest, context: tuple[int, ...]) -> Start:
        stream, sampling, most = None, self._request.sampling, request.max_new_tokens
        if sampling.temperature > 0:
            numbers = sampling.seed, request.step, request.prompt.id, request.key[1], token_checksum(context)
            stream = uniforms(*numbers, length=most)
        return Start(context, stream, most, request.stop_token_ids, self._cached(request.key, context))

    def _cached(self, key: Key, context: tuple[int, ...]) -> Cached | None:
        """Return the cache for the tokens that a context shares with its conversation's last turn."""
        tokens, cached = self._caches.pop(key, ((), None))
        if cached is None:
            return None
        differs = (number for number, (old, new) in enumerate(zip(tokens, context, strict=False)) if old != new)
        num_shared = min(next(differs, cached.num_tokens), cached.num_tokens, len(context) - 1)
        return cached.first(num_shared) if num_shared else None

    def _step(self) -> None:
        """Decode one token per turn. Answer the turns that ended."""
        self._clock += 1
        for slot, reason in self._decoder.sample():
            request, (tokens, logprobs) = self._turns.pop(slot), self._decoder.found(slot)
            self._due[request.key] = _next_join(self._clock + LEAST_STEPS)
            self._caches[request.key] = (*request.context_ids, *tokens), self._decoder.cached(slot)
            self._conversations.answer(request, TurnResult(tokens, logprobs, reason, self._version))
        self._decoder.advance()

    def _abort(self) -> None:
        """End running conversations. Their samples go back to the schedule as they started."""
        if not self._samples:
            return
        self._conversations.abort()
        for (prompt_index, _), sample in self._samples.items():
            self._schedule.left_over(prompt_index, [sample])


def _next_join(clock: int) -> int:
    """Return the first clock from `clock` on at which turns join the batch."""
    return -(-clock // JOIN_EVERY) * JOIN_EVERY
