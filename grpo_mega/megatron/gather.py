"""Gather values of response tokens on all ranks, from the ranks that computed them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_mega.batching.layout import response_places
from grpo_mega.megatron.runtime import Runtime
from grpo_mega.types import PackedBatch, Sample


def gather_responses(
    values_of: Callable[[PackedBatch], Tensor | None],
    mini_batches: Sequence[Sequence[PackedBatch]],
    samples: Sequence[Sample],
    runtime: Runtime,
    first: int | None = None,
) -> list[Tensor]:
    """Return a [response_len] float32 tensor on the host for each sample of the step, identical on every rank.

    `values_of(batch)` returns a [T] row, or None on stages without values. Collective: one reduction over all tokens.
    `first` limits the result to that many samples; None: all samples.
    """
    lengths = [sample.response_len for sample in samples[:first]]
    device = runtime.device.torch_device
    values_N = torch.zeros(sum(lengths), dtype=torch.float32, device=device)
    parts = values_N.split(lengths)
    for batch in (b for mini in mini_batches for b in mini):
        values_T = values_of(batch)
        if values_T is not None and runtime.tp_rank == 0:
            for index, places in zip(batch.sample_indices, response_places(batch, samples), strict=True):
                for in_row, in_response in places if index < len(parts) else []:
                    parts[index][in_response] = values_T[in_row]
    return list(runtime.sum(values_N).cpu().split(lengths))


def gather_old_logprobs(
    mini_batches: Sequence[Sequence[PackedBatch]], samples: Sequence[Sample], runtime: Runtime, first: int | None = None
) -> list[Tensor]:
    """Return the old log-probs of the step's (first) samples after the update. Tokens outside the loss have NaN."""

    def values_of(batch: PackedBatch) -> Tensor | None:
        return None if batch.old_logprobs is None else batch.old_logprobs.where(batch.loss_mask > 0, torch.nan)

    return gather_responses(values_of, mini_batches, samples, runtime, first)


def attach_old_logprobs(samples: Sequence[Sample], old_logprobs: Sequence[Tensor]) -> None:
    """Set old_logprobs of the first samples of a step; None for a sample with tokens outside the loss."""
    for sample, values in zip(samples, old_logprobs, strict=False):
        sample.old_logprobs = None if bool(values.isnan().any()) else values.tolist()
