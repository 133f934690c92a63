"""Map values between samples and packed rows.

Response token j of a sample whose prompt has P tokens belongs to the position that predicts it: P - 1 + j of the sample's
segment. Packed rows are written and read by `response_slice`, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from grpo_mega.types import PackedBatch, Sample


def response_slice(segment_start: int, sample: Sample) -> slice:
    """Return the positions of a packed row that predict the response of a sample with the segment start `segment_start`."""
    prompt_len = len(sample.prompt.token_ids)
    assert prompt_len > 0, f"prompt {sample.prompt.id} is empty: nothing predicts the first token of its response"
    begin = segment_start + prompt_len - 1
    return slice(begin, begin + sample.response_len)


def response_slices(batch: PackedBatch, samples: Sequence[Sample]) -> Iterator[slice]:
    """Yield the positions that predict the response of each of `batch.sample_indices`; `samples` are all of the step's."""
    starts = batch.cu_seqlens.tolist()
    for start, index in zip(starts, batch.sample_indices, strict=False):  # a last segment of padding has no sample
        yield response_slice(start, samples[index])


def from_samples(values: Sequence[Tensor], batch: PackedBatch, samples: Sequence[Sample]) -> Tensor:
    """Return a row [T] with the `values` of each of `batch.sample_indices` on its response, 0 elsewhere. Keeps gradients."""
    dtype = values[0].dtype if values else batch.loss_mask.dtype
    values_T = torch.zeros(batch.num_tokens, dtype=dtype, device=batch.tokens.device)
    for where, values_R in zip(response_slices(batch, samples), values, strict=True):
        values_T[where] = values_R
    return values_T


def segments(batch: PackedBatch) -> Tensor:
    """Return [T] int64: the index of each token's segment; padding is the last one."""
    numbers = torch.arange(batch.num_segments, device=batch.cu_seqlens.device)
    return numbers.repeat_interleave(batch.cu_seqlens.diff(), output_size=batch.num_tokens)


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Return the batch with its tensors on `device`."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
    return replace(batch, **moved)
