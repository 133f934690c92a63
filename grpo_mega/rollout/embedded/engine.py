"""The engine inside each rank's process: transformers' own model with a KV cache, one replica per rank.

It needs no GPU and no server, works for any family that transformers knows, and is an oracle of the weight mapping, since its
forward pass is not this project's. Prompts are decoded in batches of at most `max_concurrent` sequences; a sequence that ends
leaves the batch. A phase that is stopped early ends between two tokens, and its cache goes with its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from grpo_mega.hardware.device import Device
from grpo_mega.rollout.embedded.compat import scale_attention
from grpo_mega.rollout.embedded.cpu_linear import speed_up
from grpo_mega.rollout.embedded.expert_views import checkpoint_tensors
from grpo_mega.rollout.embedded.sampler import draw, uniforms
from grpo_mega.rollout.engine import Engine, OnSample, Sampling
from grpo_mega.rollout.stop_condition import StopCondition
from grpo_mega.types import Group, Prompt, Sample
from grpo_mega.weights.apply import Bucket, Entry
from grpo_mega.weights.layout import ShardLayout, hf_shards
from grpo_mega.weights.receive import mismatched_blocks, mismatched_tensors, write_entries
from grpo_mega.weights.spec import Family, ModelShape

GROUPED_MM_ROW_BYTES = 16  # torch.grouped_mm needs rows of a multiple of so many bytes
COMPACT_BELOW = 0.75  # share of live sequences below which the finished ones leave the cache


class EmbeddedEngine(Engine):
    """A failure here ends the rank itself, and sleep keeps the memory: policy and engine must fit on the machine together."""

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
        prove: bool,
        quantise: bool = False,
    ) -> None:
        """`prove`: compare checksums after each sync. `quantise`: linear layers hold the dequantised values of FP8 blocks."""
        self.device = device.torch_device
        self.max_concurrent = max_concurrent
        self._rank, self._world_size, self._prove = rank, world_size, prove
        self._side = hf_shards(family, shape, world_size, quantise=quantise)
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(
                hf_config, dtype=dtype, attn_implementation="sdpa", **_experts_implementation(shape, dtype)
            )
        self._model = model.to(self.device).eval().requires_grad_(False)
        speed_up(self._model)
        scale_attention(self._model)
        self._tensors = checkpoint_tensors(self._model, family, shape)
        self._received: list[Entry] = []
        self._problems: list[str] = []

    def shard_layout(self) -> ShardLayout:
        return self._side

    def begin_update(self) -> list[str]:
        self._received, self._problems = [], []
        return sorted(set(self.tensors()) ^ set(self._side.rank_shards(self._rank)))

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def load(self, bucket: Bucket) -> None:
        write_entries(bucket.entries, bucket.values, self.tensors(), bucket.dtype)
        if self._prove:
            self._received += bucket.entries
            self._problems += mismatched_blocks(bucket.entries, bucket.values, self.tensors())

    def end_update(self, version: int) -> list[str]:
        problems = self._problems + mismatched_tensors(self._received, self.tensors())
        if not problems:
            self.version = version
        return problems

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the model's weights by their names in its checkpoint."""
        return self._tensors

    @torch.inference_mode()
    def generate(
        self,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        stop: StopCondition | None = None,
    ) -> dict[int, Group]:
        """Take every world_size-th prompt. The clock of `stop` counts this rank's decoded tokens, batch after batch."""
        groups = {key: Group(prompts[key], []) for key in list(prompts)[self._rank :: self._world_size]}
        per_batch = max(1, self.max_concurrent // sampling.group_size)
        order = list(groups)
        if stop is None:
            # Prompts of similar length share a batch: less padding. With `stop` the last batches may never be begun, and
            # these must not always be those of the longest prompts.
            order.sort(key=lambda key: len(groups[key].prompt.token_ids))
        clock = 0
        for first in range(0, len(order), per_batch):
            if stop is not None and stop.is_met(clock):
                break
            batch = {key: groups[key] for key in order[first : first + per_batch]}
            clock = self._generate_batch(batch, sampling, step, on_sample, stop, clock)
        return {key: group for key, group in groups.items() if len(group.samples) == sampling.group_size}

    def _generate_batch(
        self,
        batch: Mapping[int, Group],
        sampling: Sampling,
        step: int,
        on_sample: OnSample,
        stop: StopCondition | None,
        clock: int,
    ) -> int:
        """Add samples to their groups until `stop` is met; return the clock at the end."""
        n, keys, groups = sampling.group_size, list(batch), list(batch.values())
        state = _Decoding.prefill(self._model, [g.prompt for g in groups], n, self.device)
        streams = _streams(groups, sampling, step, self.device)
        is_stop = torch.zeros(self._model.config.vocab_size, dtype=torch.bool, device=self.device)
        is_stop[list(sampling.stop_token_ids)] = True
        tokens_BT = torch.empty((len(groups) * n, sampling.max_response_length), dtype=torch.int64, device=self.device)
        logprobs_BT = torch.empty(tokens_BT.shape, dtype=torch.float32, device=self.device)
        for position in range(sampling.max_response_length):
            uniform = None if streams is None else streams[state.rows, position]
            tokens, logprobs = draw(
                state.logits, uniform, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k
            )
            tokens_BT[state.rows, position], logprobs_BT[state.rows, position] = tokens, logprobs
            ended = is_stop[tokens] & state.is_live
            is_last = position + 1 == sampling.max_response_length
            clock += 1
            for row in state.rows[state.is_live if is_last else ended].tolist():
                group = groups[row // n]
                stopped = bool(is_stop[tokens_BT[row, position]])
                sample = Sample(
                    prompt=group.prompt,
                    index=row % n,
                    response_ids=tokens_BT[row, : position + 1].tolist(),
                    rollout_logprobs=logprobs_BT[row, : position + 1].tolist(),
                    finish_reason="stop" if stopped else "length",
                    policy_version=self.version,
                )
                group.samples.append(sample)
                on_sample(sample, group)
                if stop is not None and len(group.samples) == n:
                    stop.done(keys[row // n], clock)
            state.is_live &= ~ended
            if is_last or not state.is_live.any():
                break
            if stop is not None and stop.is_met(clock):
                _abort(batch, stop, n, position + 1)
                break
            state.advance(self._model, tokens)
        for group in groups:
            group.samples.sort(key=lambda s: s.index)
        return clock


def _experts_implementation(shape: ModelShape, dtype: torch.dtype) -> dict[str, str]:
    """Return transformers' plain loop over experts where torch.grouped_mm, its default, would refuse their rows."""
    widths = (shape.hidden, shape.moe_ffn) if shape.num_experts else ()
    is_aligned = all(width * dtype.itemsize % GROUPED_MM_ROW_BYTES == 0 for width in widths)
    return {} if is_aligned else {"experts_implementation": "eager"}


def _abort(batch: Mapping[int, Group], stop: StopCondition, group_size: int, length: int) -> None:
    """Report the groups that are not done; their samples under way have `length` tokens."""
    for key, group in batch.items():
        num_live = group_size - len(group.samples)
        if num_live:
            stop.aborted(key, [s.response_len for s in group.samples] + [length] * num_live)


def _streams(groups: list[Group], sampling: Sampling, step: int, device: torch.device) -> Tensor | None:
    """Return uniforms [sequences, max_response_length], or None for greedy decoding."""
    if sampling.temperature == 0:
        return None
    rows = [
        uniforms(sampling.seed, step, g.prompt.id, index, sampling.max_response_length)
        for g in groups
        for index in range(sampling.group_size)
    ]
    return torch.from_numpy(np.stack(rows)).to(device)


@dataclass
class _Decoding:
    """The state of a batch: inputs of the model for the next token of the sequences still in the cache."""

    cache: DynamicCache
    mask: Tensor  # [B, tokens so far], 0 on the left padding
    positions: Tensor  # [B], of the last token
    logits: Tensor  # [B, vocab], for the next token
    rows: Tensor  # [B], which sequence of the batch each row is
    is_live: Tensor  # [B] bool

    @classmethod
    def prefill(cls, model: Any, prompts: list[Prompt], group_size: int, device: torch.device) -> _Decoding:
        """Run each prompt once, then repeat its cache for the samples of its group."""
        longest = max(len(p.token_ids) for p in prompts)
        ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, longest - len(prompt.token_ids) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
        cache = DynamicCache(config=model.config)
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache.batch_repeat_interleave(group_size)
        size = len(prompts) * group_size
        return cls(
            cache=cache,
            mask=mask.repeat_interleave(group_size, dim=0),
            positions=positions[:, -1].repeat_interleave(group_size),
            logits=out.logits[:, -1].repeat_interleave(group_size, dim=0),
            rows=torch.arange(size, device=device),
            is_live=torch.ones(size, dtype=torch.bool, device=device),
        )

    def advance(self, model: Any, tokens: Tensor) -> None:
        """Feed the sampled tokens; first drop the sequences that have ended, if there are enough of them."""
        if self.is_live.float().mean() < COMPACT_BELOW:
            keep = self.is_live.nonzero().squeeze(1)
            self.cache.batch_select_indices(keep)
            self.mask, self.positions, self.rows = self.mask[keep], self.positions[keep], self.rows[keep]
            self.is_live, tokens = self.is_live[keep], tokens[keep]
        self.mask = torch.cat((self.mask, self.mask.new_ones(len(self.mask), 1)), dim=1)
        self.positions = self.positions + 1
        out = model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits = out.logits[:, -1]
