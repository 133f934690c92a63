"""Pack samples end to end into the micro-batches of one DP rank, without padding sample by sample.

Input: the step's samples by mini-batch, the same on all ranks. Output: this DP rank's PackedBatches on the CPU, with NaN for
advantages that are not assigned yet. Each row has only the part of its context-parallel rank; lengths and budgets count the
tokens of one such rank. Within a mini-batch every rank has the same number of micro-batches, all of the same length T. If there
are too few samples, some micro-batches are only padding, with loss 0. The assignment of samples to micro-batches never changes
loss, gradient or metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_mega.batching.balance import balance
from grpo_mega.batching.layout import from_samples, part_of, response_slice
from grpo_mega.config.base import tokens_on_rank
from grpo_mega.errors import PlanError
from grpo_mega.types import Group, PackedBatch, Sample, unknown_expert


def split(groups: Sequence[Group], num_mini_batches: int) -> list[list[Sample]]:
    """Split the samples into mini-batches: contiguous runs of whole groups, with numbers of groups that differ by at most 1."""
    if len(groups) < num_mini_batches:
        raise PlanError(
            f"batch.mini_batches={num_mini_batches} needs as many groups, but the step has {len(groups)}; "
            "lower it or raise batch.prompts_per_step"
        )
    ends = [len(groups) * (m + 1) // num_mini_batches for m in range(num_mini_batches)]
    runs = [groups[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [[sample for group in run for sample in group.samples] for run in runs]


def pack(
    mini_batches: Sequence[Sequence[Sample]],
    token_weights: Sequence[Sequence[float]],
    *,
    dp_size: int,
    dp_rank: int,
    token_budget: int,
    length_multiple: int = 1,
    micro_batch_multiple: int = 1,
    tokens_per_pair: float = 0.0,
    share_prompts: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> list[list[PackedBatch]]:
    """Return [mini_batch][micro_batch] of DP rank `dp_rank` and context-parallel rank `cp_rank`.

    token_weights[m][i] is the weight of each response token of sample i of mini-batch m in the global loss
    (algorithm/token_weights.py); a sample of weight 0 has loss_mask 0. `sample_indices` count all of the step's samples,
    through the mini-batches. T is the longest micro-batch of the mini-batch on any rank, rounded up to `length_multiple`, so it
    may exceed `token_budget` by less than that. The number of micro-batches is a multiple of `micro_batch_multiple`. Raise
    PlanError if a sample is longer than the budget.
    """
    result: list[list[PackedBatch]] = []
    length_multiple = math.lcm(length_multiple, 1 if cp_size == 1 else 2)  # the last segment, padding, is split too
    offset = 0
    for samples, weights in zip(mini_batches, token_weights, strict=True):
        units = _units(samples, token_budget) if share_prompts else [[i] for i in range(len(samples))]
        lengths = [tokens_on_rank(num_tokens_of([samples[i] for i in unit]), cp_size) for unit in units]
        ranks = balance(
            lengths,
            dp_size=dp_size,
            token_budget=token_budget,
            micro_batch_multiple=micro_batch_multiple,
            length_multiple=length_multiple,
            tokens_per_pair=tokens_per_pair * cp_size,  # a length stands for cp_size times as many tokens
        )
        longest = max(sum(lengths[i] for i in members) for micro_batches in ranks for members in micro_batches)
        num_tokens = max(1, -(-longest // length_multiple)) * length_multiple
        chosen = [[i for unit in members for i in units[unit]] for members in ranks[dp_rank]]
        rows = [_pack_one(samples, weights, each, offset, num_tokens * cp_size, cp_size, share_prompts) for each in chosen]
        result.append([part_of(row, cp_size, cp_rank) for row in rows] if cp_size > 1 else rows)
        offset += len(samples)
    return result


def attach_advantages(batches: Sequence[PackedBatch], samples: Sequence[Sample]) -> None:
    """Replace the advantages in the batches with the advantages of the samples. `samples` are all samples of the step."""
    rows = [s.advantages for s in samples if s.advantages is not None]
    assert len(rows) == len(samples), "a sample has no advantages"
    attach(batches, "advantages", rows, samples)


def attach(batches: Sequence[PackedBatch], name: str, rows: Sequence[Tensor], samples: Sequence[Sample]) -> None:
    """Set the batches' field `name` from one row [response_len] per sample of the step; 0 elsewhere."""
    for batch in batches:
        present = [rows[i].to(batch.tokens.device, batch.loss_mask.dtype) for i in batch.sample_indices]
        setattr(batch, name, from_samples(present, batch, samples))


def _pack_one(
    samples: Sequence[Sample],
    weights: Sequence[float],
    members: list[int],
    offset: int,
    num_tokens: int,
    cp_size: int,
    share_prompts: bool,
) -> PackedBatch:
    """Pack the samples at `members` into `num_tokens` tokens, each padded so that `cp_size` ranks can share it.

    `offset` is the index of samples[0] in the step.
    """
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    position_ids = torch.zeros(num_tokens, dtype=torch.int64)
    loss_mask, loss_weights, advantages, rollout_logprobs = torch.zeros(4, num_tokens).unbind()
    routes = _routes([samples[member] for member in members], num_tokens)
    boundaries = [0]
    for member in members:
        sample, start = samples[member], boundaries[-1]
        context = sample.prompt.token_ids[-1:] if share_prompts else sample.prompt.token_ids
        end = start + len(context) + sample.response_len
        length = tokens_on_rank(end - start, cp_size) * cp_size
        assert len(sample.rollout_logprobs) == sample.response_len, f"sample {offset + member} lacks rollout_logprobs"
        tokens[start : end - sample.response_len] = torch.tensor(context)
        tokens[end - sample.response_len : end] = torch.from_numpy(np.asarray(sample.response_ids, dtype=np.int64))
        targets[start : end - 1] = tokens[start + 1 : end]
        position_ids[start : start + length] = torch.arange(length) + len(sample.prompt.token_ids) - len(context)
        response = response_slice(start, sample, is_shared=share_prompts)
        loss_mask[response] = float(weights[member] != 0)
        loss_weights[response] = weights[member]
        advantages[response] = torch.nan if sample.advantages is None else sample.advantages
        rollout_logprobs[response] = torch.from_numpy(np.asarray(sample.rollout_logprobs, dtype=np.float32))
        if routes is not None and sample.routes is not None:
            routes[start : start + len(sample.routes.experts)] = torch.from_numpy(sample.routes.experts)
        boundaries.append(start + length)
    shared_prompt_segments = (
        _lay_prompts([samples[i] for i in members], tokens, position_ids, boundaries) if share_prompts else None
    )
    if boundaries[-1] < num_tokens:
        position_ids[boundaries[-1] :] = torch.arange(num_tokens - boundaries[-1])
        boundaries.append(num_tokens)
    return PackedBatch(
        tokens=tokens,
        targets=targets,
        position_ids=position_ids,
        cu_seqlens=torch.tensor(boundaries, dtype=torch.int32),
        loss_mask=loss_mask,
        loss_weights=loss_weights,
        advantages=advantages,
        rollout_logprobs=rollout_logprobs,
        sample_indices=[offset + member for member in members],
        lengths=[samples[member].total_len for member in members],
        routes=routes,
        shared_prompt_segments=shared_prompt_segments,
    )


def _lay_prompts(samples: Sequence[Sample], tokens: Tensor, position_ids: Tensor, boundaries: list[int]) -> list[int]:
    """Append each prompt without its last token once, after all samples. Return each sample's trunk (see PackedBatch)."""
    shared_prompt_segments: dict[int, int] = {}
    for prompt in {sample.prompt.id: sample.prompt for sample in samples}.values():
        start, length = boundaries[-1], len(prompt.token_ids) - 1
        shared_prompt_segments[prompt.id] = len(boundaries) - 1 if length else -1
        if length:
            tokens[start : start + length] = torch.tensor(prompt.token_ids[:-1])
            position_ids[start : start + length] = torch.arange(length)
            boundaries.append(start + length)
    return [shared_prompt_segments[sample.prompt.id] for sample in samples]


def num_tokens_of(samples: Sequence[Sample]) -> int:
    """Return the number of tokens of samples that share one prompt. The prompt counts once, its last token once per sample."""
    return len(samples[0].prompt.token_ids) - 1 + sum(1 + sample.response_len for sample in samples)


def _units(samples: Sequence[Sample], token_budget: int) -> list[list[int]]:
    """Return runs of samples that share their prompt, with as many samples as fit into a micro-batch."""
    units: list[list[int]] = []
    for i, sample in enumerate(samples):
        before = [samples[j] for j in units[-1]] if units else []
        fits = bool(before) and before[0].prompt.id == sample.prompt.id and num_tokens_of([*before, sample]) <= token_budget
        if fits:
            units[-1].append(i)
        else:
            units.append([i])
    return units


def _routes(samples: Sequence[Sample], num_tokens: int) -> Tensor | None:
    """Return routes [num_tokens, ...] that are unknown for every token; None if no sample has routes."""
    like = next((sample.routes.experts for sample in samples if sample.routes), None)
    if like is None:
        return None
    return torch.from_numpy(np.full((num_tokens, *like.shape[1:]), unknown_expert(like.dtype), like.dtype))
