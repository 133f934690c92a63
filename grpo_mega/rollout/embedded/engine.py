"""The engine inside each rank's process: the transformers model with a KV cache, one replica per rank.

It needs no GPU and no server and works for every family that transformers supports. It also checks the weight mapping,
because its forward pass is not code of this project. Prompts are decoded in batches of at most `max_concurrent`
sequences, and finished sequences leave the batch. A phase that is stopped early ends between two tokens and discards
the cache with the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_mega.distributed.device import Device
from grpo_mega.rollout.embedded.model import RouteRecorder, checkpoint_tensors, make_model
from grpo_mega.rollout.embedded.sampler import draw, uniforms
from grpo_mega.rollout.engine import Engine, RolloutRequest, Sampling
from grpo_mega.rollout.routes import RouterSizes
from grpo_mega.rollout.schedule import Schedule, schedule_of
from grpo_mega.types import FinishReason, Group, Prompt, Sample, Span
from grpo_mega.weights.apply import Bucket, Entry
from grpo_mega.weights.layout import hf_shards
from grpo_mega.weights.receive import mismatched_blocks, mismatched_tensors, write_entries
from grpo_mega.weights.spec import Family, ModelShape

COMPACT_BELOW = 0.75  # finished sequences leave the cache if the share of live sequences is below this


class EmbeddedEngine(Engine):
    """An engine without a server. A failure ends the rank. `sleep` frees no memory, so policy and engine must fit
    together.
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
        clock = 0
        while (stop is None or not stop.is_met(clock)) and (taken := schedule.take()):
            batch = [(prompt_index, sample) for prompt_index, samples in taken.items() for sample in samples]
            if stop is not None:
                stop.start_clocks |= {(prompt_index, sample.index): clock for prompt_index, sample in batch}
            clock = self._generate_batch(batch, request, schedule, clock)
        return schedule.finish()

    def _generate_batch(
        self, batch: Sequence[tuple[int, Sample]], request: RolloutRequest, schedule: Schedule, clock: int
    ) -> int:
        """Decode until all samples end or the phase stops. Return the clock. Unfinished samples go back to the
        schedule.
        """
        samples, sampling, stop = [sample for _, sample in batch], request.sampling, request.stop
        longest, first_clock = sampling.max_response_length, clock
        self._recorder.start(len(samples), longest, self.device, is_on=sampling.with_routes)
        rows_by_kind = [
            [row for row, s in enumerate(samples) if (s.response_len > 0) == earlier] for earlier in (False, True)
        ]
        states = [_Decoding.prefill(self._model, samples, rows, self._recorder) for rows in rows_by_kind if rows]
        streams = _streams(samples, sampling, request.step, self.device)
        is_stop = torch.zeros(self._model.config.vocab_size, dtype=torch.bool, device=self.device)
        is_stop[list(sampling.stop_token_ids)] = True
        first_B = torch.tensor([sample.response_len for sample in samples], device=self.device)
        tokens_BT = torch.empty((len(samples), longest), dtype=torch.int64, device=self.device)
        logprobs_BT = torch.empty(tokens_BT.shape, dtype=torch.float32, device=self.device)

        def extended(row: int, reason: FinishReason | None) -> tuple[int, Sample]:
            (prompt_index, sample), num_tokens = batch[row], clock - first_clock
            end = sample.response_len + num_tokens
            return prompt_index, replace(
                sample,
                response_ids=[*sample.response_ids, *tokens_BT[row, :num_tokens].tolist()],
                rollout_logprobs=[*sample.rollout_logprobs, *logprobs_BT[row, :num_tokens].tolist()],
                finish_reason=reason,
                spans=[*sample.spans, Span(self.version, sample.response_len, end)],
                routes=self._recorder.routes(row, sample, num_tokens - 1),  # the last token was not fed to the model
            )

        while states:
            position, clock = clock - first_clock, clock + 1
            for state in states:
                rows = state.rows
                positions = (first_B[rows] + position).clamp_(max=longest - 1)  # finished sequences still have a row
                uniform = None if streams is None else streams[rows, positions]
                state.tokens, logprobs_BT[rows, position] = draw(
                    state.logits, uniform, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
                )
                tokens_BT[rows, position] = state.tokens
                if request.on_token is not None:
                    request.on_token(int(state.tokens[0]))
                is_stopped = is_stop[state.tokens]
                ended = (is_stopped | (positions + 1 == longest)) & state.is_live
                for row, stopped in zip(rows[ended].tolist(), is_stopped[ended].tolist(), strict=True):
                    schedule.ended(*extended(row, "stop" if stopped else "length"), clock)
                state.is_live &= ~ended
            states = [state for state in states if state.is_live.any()]
            if stop is not None and states and stop.is_met(clock):
                for row in (row for state in states for row in state.rows[state.is_live].tolist()):
                    prompt_index, sample = extended(row, None)
                    schedule.left_over(prompt_index, [sample])
                break
            for state in states:
                state.advance(self._model)
                self._recorder.fed(state.rows, position)
        return clock


def _streams(samples: Sequence[Sample], sampling: Sampling, step: int, device: torch.device) -> Tensor | None:
    """Return uniforms [sequences, max_response_length], or None for greedy decoding."""
    if sampling.temperature == 0:
        return None
    rows = [
        uniforms(
            sampling.seed, s.first_version if s.spans else step, s.prompt.id, s.index, sampling.max_response_length
        )
        for s in samples
    ]
    return torch.from_numpy(np.stack(rows)).to(device)


@dataclass
class _Decoding:
    """The state of a batch: the model's inputs for the next token of each sequence in the cache."""

    cache: DynamicCache
    mask: Tensor  # [B, tokens so far]; 0 on the left padding
    positions: Tensor  # [B] position of each sequence's last token
    logits: Tensor  # [B, vocab] logits of the next token
    tokens: Tensor  # [B] last sampled tokens
    rows: Tensor  # [B] index of each sequence in the batch
    is_live: Tensor  # [B] bool

    @classmethod
    def prefill(cls, model: Any, samples: Sequence[Sample], rows: Sequence[int], recorder: RouteRecorder) -> _Decoding:
        """Run each prompt once and copy its cache for each sample of the group. Run each continued response
        separately.
        """
        contexts: list[tuple[int, ...]] = []
        source: list[int] = []  # index of each sample's context
        shared: Prompt | None = None
        for sample in (samples[row] for row in rows):
            if sample.response_len or sample.prompt is not shared:
                contexts.append((*sample.prompt.token_ids, *sample.response_ids))
                shared = None if sample.response_len else sample.prompt
            source.append(len(contexts) - 1)
        longest, device = max(map(len, contexts)), model.device
        ids = torch.zeros((len(contexts), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, longest - len(context) :] = torch.tensor(context)
            mask[row, longest - len(context) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
        cache = DynamicCache(config=model.config)
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        recorder.prefilled(rows, source, [len(context) for context in contexts])
        source_B = torch.tensor(source, device=device)
        cache.batch_select_indices(source_B)
        return cls(
            cache=cache,
            mask=mask[source_B],
            positions=positions[source_B, -1],
            logits=out.logits[source_B, -1],
            tokens=torch.zeros(len(rows), dtype=torch.int64, device=device),
            rows=torch.tensor(rows, device=device),
            is_live=torch.ones(len(rows), dtype=torch.bool, device=device),
        )

    def advance(self, model: Any) -> None:
        """Feed the sampled tokens to the model. First drop finished sequences from the cache, if there are enough of
        them.
        """
        if self.is_live.float().mean() < COMPACT_BELOW:
            keep = self.is_live.nonzero().squeeze(1)
            self.cache.batch_select_indices(keep)
            self.mask, self.positions, self.rows = self.mask[keep], self.positions[keep], self.rows[keep]
            self.is_live, self.tokens = self.is_live[keep], self.tokens[keep]
        self.mask = torch.cat((self.mask, self.mask.new_ones(len(self.mask), 1)), dim=1)
        self.positions = self.positions + 1
        out = model(
            input_ids=self.tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits = out.logits[:, -1]
