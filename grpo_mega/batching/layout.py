"""Map values between samples and packed rows, and split rows over context-parallel ranks.

Response token j of a sample with P prompt tokens belongs to the position that predicts it: P - 1 + j of the sample's
segment. Packed rows are written and read with `response_slice`, so the two cannot disagree.

With context parallelism each segment, padded to a multiple of 2 * cp tokens, is split into 2 * cp chunks. Rank r holds
chunk r and chunk 2 * cp - 1 - r, in this order, so causal attention costs the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_mega.types import PackedBatch, Sample, unknown_expert


def response_slice(segment_start: int, sample: Sample, *, is_shared: bool = False) -> slice:
    """Return the positions of a packed row that predict the response of a sample whose segment starts at
    `segment_start`.

    `is_shared`: the segment has only the last token of the prompt.
    """
    prompt_len = min(1, len(sample.prompt.token_ids)) if is_shared else len(sample.prompt.token_ids)
    assert prompt_len > 0, f"prompt {sample.prompt.id} is empty: nothing predicts the first token of its response"
    start = segment_start + prompt_len - 1
    return slice(start, start + sample.response_len)


def chunks_of(length: int, cp_size: int, cp_rank: int) -> list[range]:
    """Return the positions of a segment of `length` tokens that a context-parallel rank holds, chunk by chunk."""
    if cp_size == 1:
        return [range(length)]
    size, rest = divmod(length, 2 * cp_size)
    assert not rest, f"a segment of {length} tokens is no multiple of {2 * cp_size}"
    return [range(size * chunk, size * (chunk + 1)) for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank)]


def part_of(batch: PackedBatch, cp_size: int, cp_rank: int) -> PackedBatch:
    """Return a context-parallel rank's part of a whole row. Targets stay the targets of the whole row."""
    cuts = batch.cu_seqlens.tolist()
    parts = ((start, chunks_of(end - start, cp_size, cp_rank)) for start, end in pairwise(cuts))
    rows = torch.cat([start + torch.arange(c.start, c.stop) for start, chunks in parts for c in chunks])
    kept: dict[str, Any] = {name: v[rows] for name, v in _tensors(batch).items() if name != "cu_seqlens"}
    return replace(batch, **kept, cu_seqlens=batch.cu_seqlens // cp_size, cp_size=cp_size, cp_rank=cp_rank)


def response_places(batch: PackedBatch, samples: Sequence[Sample]) -> Iterator[list[tuple[slice, slice]]]:
    """Yield, for each of `batch.sample_indices`, pairs of positions: in the row, and of the response tokens that they
    predict.

    `samples` are all samples of the step. There is one pair per chunk on this rank.
    """
    cuts = batch.cu_seqlens.tolist()
    for start, end, index in zip(cuts, cuts[1:], batch.sample_indices, strict=False):  # padding has no sample
        whole, pairs = response_slice(0, samples[index], is_shared=batch.shared_prompt_segments is not None), []
        for chunk in chunks_of((end - start) * batch.cp_size, batch.cp_size, batch.cp_rank):
            first = min(max(whole.start, chunk.start), chunk.stop)
            last = max(first, min(whole.stop, chunk.stop))
            move = start - chunk.start
            pairs.append((slice(first + move, last + move), slice(first - whole.start, last - whole.start)))
            start += len(chunk)
        yield pairs


def from_samples(values: Sequence[Tensor], batch: PackedBatch, samples: Sequence[Sample]) -> Tensor:
    """Return a row [T] with each sample's `values` [response_len] on its response, 0 elsewhere. Keeps gradients.

    `values` and `samples` are of all samples of the step.
    """
    values_T = torch.zeros(batch.num_tokens, dtype=values[0].dtype, device=batch.tokens.device)
    for index, places in zip(batch.sample_indices, response_places(batch, samples), strict=True):
        for in_row, in_response in places:
            values_T[in_row] = values[index][in_response]
    return values_T


def routes_row(batch: PackedBatch, samples: Sequence[Sample]) -> Tensor | None:
    """Return the recorded experts of the row's tokens (see PackedBatch.routes). `samples` are all samples of the step.

    Tokens without a record have `unknown_expert`.
    """
    recorded = [samples[index].routes for index in batch.sample_indices]
    known = [routes.experts for routes in recorded if routes]
    if not known:
        return None
    row = np.full((batch.num_tokens, *known[0].shape[1:]), unknown_expert(known[0].dtype), known[0].dtype)
    for (start, end), routes in zip(pairwise(batch.cu_seqlens.tolist()), recorded, strict=False):  # padding has none
        if routes is None:
            continue
        for chunk in chunks_of((end - start) * batch.cp_size, batch.cp_size, batch.cp_rank):
            experts = routes.experts[chunk.start : chunk.stop]
            row[start : start + len(experts)] = experts
            start += len(chunk)
    return torch.from_numpy(row)


def segments(batch: PackedBatch) -> Tensor:
    """Return [T] int64: the index of each token's segment. Padding is the last segment."""
    numbers = torch.arange(batch.num_segments, device=batch.cu_seqlens.device)
    return numbers.repeat_interleave(batch.cu_seqlens.diff(), output_size=batch.num_tokens)


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Return the batch with its tensors on `device`."""
    moved: dict[str, Any] = {name: v.to(device) for name, v in _tensors(batch).items()}
    return replace(batch, **moved)


def _tensors(batch: PackedBatch) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
