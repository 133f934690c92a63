"""The engine inside each rank's process: the transformers model with a KV cache, one replica per rank.

It needs no GPU and no server and works for every family that transformers supports. It also checks the weight mapping,
because its forward pass is not code of this project. Prompts are decoded in batches of at most `max_concurrent`
sequences, and finished sequences leave the batch. A phase that is stopped early ends between two tokens and discards
the cache with the batch. Turns of conversations join a running batch (turns.py). Single responses do not, because a
sample's log-probs then would depend on the lengths of earlier samples in their last bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.errors import EngineError
from grpo_mega.rollout.embedded.decoder import Decoder, Start
from grpo_mega.rollout.embedded.model import RouteRecorder, checkpoint_tensors, make_model
from grpo_mega.rollout.embedded.sampler import uniforms
from grpo_mega.rollout.embedded.turns import TurnLoop
from grpo_mega.rollout.engine import Engine, RolloutRequest, Sampling
from grpo_mega.rollout.routes import RouterSizes
from grpo_mega.rollout.schedule import Schedule, schedule_of
from grpo_mega.types import FinishReason, Group, Sample, Span
from grpo_mega.weights.apply import Bucket, Entry
from grpo_mega.weights.layout import hf_shards
from grpo_mega.weights.receive import mismatched_blocks, mismatched_tensors, write_entries
from grpo_mega.weights.spec import Family, ModelShape

if TYPE_CHECKING:
    from grpo_mega.rollout.sessions.conversations import Conversations


class EmbeddedEngine(Engine):
    """An engine without a server. A failure ends the rank, except the failure of a conversation. `sleep` frees no
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
        """`verify`: compare checksums after each sync. `quantise`: linear layers store the dequantised values of FP8
        blocks.
        """
        super().__init__(hf_shards(family, shape, world_size, quantise=quantise))
        self.device = device.torch_device
        self.max_concurrent = max_concurrent
        self._rank, self._world_size, self._verify = rank, world_size, verify
        self._model = make_model(hf_config, shape, dtype, self.device)
        self._recorder = RouteRecorder(self._model, RouterSizes.of(shape, hf_config) if shape.num_experts else None)
        self._tensors = checkpoint_tensors(self._model, family, shape)
        self._received: list[Entry] = []
        self._problems: list[str] = []

    def start_update(self) -> list[str]:
        self._received, self._problems = [], []
        return sorted(set(self._tensors) ^ set(self._side.rank_shards(self._rank)))

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

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
        """Return the model's weights by their names in a checkpoint."""
        return self._tensors

    @torch.inference_mode()
    def generate(self, request: RolloutRequest) -> dict[int, Group]:
        """Generate every world_size-th group. The clock of `stop` counts this rank's decoding steps over all
        batches.
        """
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
            groups = schedule.finish().items()
            return {
                index: group for index, group in groups if not self.failure or group.is_complete(sampling.group_size)
            }
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
        """Run the conversations of the schedule. Set `failure` if one fails."""
        self._recorder.start(0, 0, self.device, is_on=False)
        num_slots = min(num_slots, schedule.num_waiting)
        decoder = Decoder(self._model, num_slots, request.sampling.max_response_length, request.sampling)
        try:
            TurnLoop(decoder, conversations, request, schedule, self.version).run()
        except EngineError as error:
            self.failure = f"a conversation in step {request.step} failed: {error}"

    def _generate_batch(
        self, batch: Sequence[tuple[int, Sample]], request: RolloutRequest, schedule: Schedule, clock: int
    ) -> int:
        """Decode until all samples end or the phase stops. Return the clock. Unfinished samples go back to the
        schedule.
        """
        samples, sampling, stop = [sample for _, sample in batch], request.sampling, request.stop
        longest = sampling.max_response_length
        self._recorder.start(len(samples), longest, self.device, is_on=sampling.with_routes)
        decoder = Decoder(self._model, len(samples), longest, sampling, self._recorder)
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
            return prompt_index, replace(
                sample,
                response_ids=[*sample.response_ids, *tokens],
                rollout_logprobs=[*sample.rollout_logprobs, *logprobs],
                finish_reason=reason,
                spans=[*sample.spans, Span(self.version, sample.response_len, sample.response_len + len(tokens))],
                routes=self._recorder.routes(row, sample, len(tokens) - 1),  # the last token was not fed to the model
            )

        while decoder.is_running:
            clock += 1
            ended = decoder.sample()
            if request.on_tokens is not None:
                request.on_tokens(decoder.tokens_ST[0, : decoder.num_steps].tolist())
            for row, reason in ended:
                schedule.ended(*extended(row, reason), clock)
            if stop is not None and decoder.is_running and stop.is_met(clock):
                for row in decoder.live_slots:
                    prompt_index, sample = extended(row, None)
                    schedule.left_over(prompt_index, [sample])
                break
            decoder.advance()
        return clock


def _start_of(sample: Sample, sampling: Sampling, step: int) -> Start:
    """Return how a sample starts in `step`, or continues."""
    stream, prompt = None, sample.prompt
    if sampling.temperature > 0:
        version = sample.first_version if sample.spans else step
        stream = uniforms(sampling.seed, version, prompt.id, sample.index, sampling.max_response_length)
    return Start(
        context=(*prompt.token_ids, *sample.response_ids) if sample.response_len else prompt.token_ids,
        stream=stream,
        first=sample.response_len,
        end=sampling.max_response_length,
        stop_token_ids=sampling.stop_token_ids,
    )
