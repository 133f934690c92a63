"""Map values between samples and packed rows, and split rows over context-parallel ranks.

A sample has one segment, or one per rewritten history (Sample.segments). Response token j of a segment with a context
of P tokens belongs to the position that predicts it: P - 1 + j of the segment. Packed rows are written and read with
`response_slice`, so the two cannot disagree.

With context parallelism each segment, padded to a multiple of 2 * cp tokens, is split into 2 * cp chunks. Rank r holds
chunk r and chunk 2 * cp - 1 - r, in this order, so causal attention costs the same on every rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_mega.config.algorithm import AlgorithmConfig, CorrectionConfig
from grpo_mega.types import PackedBatch, Sample, Segment, unknown_expert


def response_slice(segment_start: int, segment: Segment, *, is_shared: bool = False) -> slice:
    """Return the positions of a packed row that predict the response tokens of a segment that starts at
    `segment_start`.

    `is_shared`: the row has only the last token of the segment's context.
    """
    context_len = min(1, len(segment.context_ids)) if is_shared else len(segment.context_ids)
    assert context_len > 0, "an empty prompt: nothing predicts the first token of its response"
    start = segment_start + context_len - 1
    return slice(start, start + segment.end - segment.start)


def shares_prompt(sample: Sample) -> bool:
    """Return True if the sample's row can leave its prompt to a segment that the samples of the prompt share."""
    return not sample.contexts


def sampled_mask(sample: Sample) -> Tensor:
    """Return a vector [response_len] float32: 1 on tokens that the policy sampled, 0 on inserted tokens."""
    if not sample.sampled:
        return torch.ones(sample.response_len)
    mask = torch.zeros(sample.response_len)
    for start, end in sample.sampled:
        mask[start:end] = 1.0
    return mask


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
    numbers = zip(batch.sample_indices, batch.segment_numbers, strict=True)
    for start, end, (index, number) in zip(cuts, cuts[1:], numbers, strict=False):  # padding has no sample
        sample, segment = samples[index], samples[index].segments()[number]
        is_shared = batch.shared_prompt_segments is not None and shares_prompt(sample)
        whole, pairs = response_slice(0, segment, is_shared=is_shared), []
        for chunk in chunks_of((end - start) * batch.cp_size, batch.cp_size, batch.cp_rank):
            first = min(max(whole.start, chunk.start), chunk.stop)
            last = max(first, min(whole.stop, chunk.stop))
            move, shift = start - chunk.start, segment.start - whole.start
            pairs.append((slice(first + move, last + move), slice(first + shift, last + shift)))
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

    Tokens without a record have `unknown_expert`. Samples with several segments have no routes.
    """
    recorded = [samples[index].routes for index in batch.sample_indices]
    assert not any(samples[index].routes and samples[index].contexts for index in batch.sample_indices)
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
    return _on_segments(batch, torch.arange(batch.num_segments)) if batch.segment_ids is None else batch.segment_ids


def sequences(batch: PackedBatch) -> Tensor:
    """Return [T] int64: for each token the index of its sample's first segment. Other segments are as in `segments`."""
    if batch.sequence_ids is not None:
        return batch.sequence_ids
    first: dict[int, int] = {}
    of_samples = [first.setdefault(index, segment) for segment, index in enumerate(batch.sample_indices)]
    return _on_segments(batch, torch.tensor([*of_samples, *range(len(of_samples), batch.num_segments)]))


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Return the batch with its tensors on `device`, and with what passes would otherwise wait for the device to
    learn.
    """
    known = replace(
        batch,
        num_loss_tokens=int((batch.loss_mask > 0).sum()),
        segment_ids=segments(batch),
        sequence_ids=sequences(batch),
        padded_lengths=torch.tensor([*batch.lengths, 0]),
    )
    moved: dict[str, Any] = {name: v.to(device) for name, v in _tensors(known).items()}
    return replace(known, **moved)


def note_gradients(batches: Sequence[PackedBatch], a: AlgorithmConfig) -> None:
    """Set `has_gradients` of an update's batches on the device, before the update, because this waits for the device.

    Ratios to old_logprobs may be clipped, and a correction may drop tokens.
    """
    lacking = []
    for batch in batches:
        lacking_T = (batch.loss_mask > 0) & (batch.advantages == 0)
        if a.positive_nll > 0 and batch.nll_weights is not None:
            lacking_T &= batch.nll_weights == 0
        lacking.append(lacking_T.any())
    for batch, lacks in zip(batches, torch.stack(lacking).tolist() if lacking else (), strict=True):
        batch.has_gradients = not lacks and batch.old_logprobs is None and a.correction == CorrectionConfig()


def _on_segments(batch: PackedBatch, values_S: Tensor) -> Tensor:
    """Return [T]: the value of each token's segment."""
    return values_S.to(batch.cu_seqlens.device).repeat_interleave(batch.cu_seqlens.diff(), output_size=batch.num_tokens)


def _tensors(batch: PackedBatch) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
