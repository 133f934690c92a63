"""Pack samples end to end into the micro-batches of one DP rank, balanced over all ranks, without padding sample by
sample.

Input: the step's samples by mini-batch, the same on all ranks. Output: this DP rank's PackedBatches on the CPU, with
NaN for advantages that are not assigned yet. Routes are attached later, when they have reached the ranks that train
them. Each row has only the part of its context-parallel rank; lengths and budgets count the tokens of one such rank.
The segments of a sample may go to different micro-batches, unless the loss needs sums over the whole sample.
Within a mini-batch every rank has the same number of micro-batches, all of the same length T. If there are too few
samples, some micro-batches are only padding, with loss 0. The assignment of samples to micro-batches never changes
loss, gradient or metrics.

All micro-batches are padded to the longest one, so `balance` minimises its length: samples are placed longest first,
then exchanged between long and short micro-batches ("bins"). Equal tokens mean equal work, except in attention, because
its work grows with the square of a sample's length. So bins are dealt to give every rank the same work. The result
depends only on the arguments, so all ranks compute the same plan without communication.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_mega.batching.layout import part_of, response_slice, sampled_mask, shares_prompt
from grpo_mega.config.base import tokens_on_rank
from grpo_mega.errors import PlanError
from grpo_mega.types import Group, PackedBatch, Sample, Segment

CLOSE_ENOUGH = (1e-4, 2e-4, 4e-4)  # the longest bin may exceed the mean by these shares, tried in this order
MAX_ROUNDS = 40  # rounds of exchanges per share
NUM_MOVABLE = 11  # the shortest samples of a bin take part in exchanges, because they make the finest differences
NUM_PARTNERS = 24  # short bins that are candidates for each long bin in a round

Ints = NDArray[np.int64]
Row = tuple[int, int, Segment]  # index of the sample in its mini-batch, number of its segment, and the segment


@dataclass(frozen=True)
class PackingSpec:
    """The rank that packs, and what its layout and precision require of micro-batches."""

    dp_size: int
    dp_rank: int
    token_budget: int  # largest number of tokens of a micro-batch, before rounding
    length_multiple: int = 1
    micro_batch_multiple: int = 1  # a mini-batch has a multiple of this many micro-batches
    tokens_per_pair: float = 0.0  # work of attention for a query and a key, relative to all other work for a token
    share_prompts: bool = False
    keeps_samples_whole: bool = True  # all segments of a sample must be in one micro-batch
    cp_size: int = 1
    cp_rank: int = 0

    @property
    def padded_multiple(self) -> int:
        """Return the multiple of tokens of a micro-batch. Its last segment, padding, is split over ranks too."""
        return math.lcm(self.length_multiple, 1 if self.cp_size == 1 else 2)


def split(groups: Sequence[Group], num_mini_batches: int) -> list[list[Sample]]:
    """Split the samples into mini-batches: contiguous runs of whole groups, with numbers of groups that differ by at
    most 1.
    """
    if len(groups) < num_mini_batches:
        raise PlanError(
            f"batch.mini_batches={num_mini_batches} needs as many groups, but the step has {len(groups)}; "
            "lower it or raise batch.prompts_per_step"
        )
    ends = [len(groups) * (m + 1) // num_mini_batches for m in range(num_mini_batches)]
    runs = [groups[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return [[sample for group in run for sample in group.samples] for run in runs]


def pack_mini_batches(
    mini_batches: Sequence[Sequence[Sample]],
    token_weights: Sequence[Sequence[float]],
    spec: PackingSpec,
) -> list[list[PackedBatch]]:
    """Return [mini_batch][micro_batch] of the spec's DP rank and context-parallel rank.

    token_weights[m][i] is the weight of each sampled token of sample i of mini-batch m in the global loss
    (algorithm/token_weights.py); a sample of weight 0 has loss_mask 0. `sample_indices` count all of the step's
    samples, through the mini-batches. T is the longest micro-batch of the mini-batch on any rank, rounded up to
    `length_multiple`, so it may exceed `token_budget` by less than that. Raise PlanError if a sample, or a segment with
    keeps_samples_whole=False, is longer than the budget.
    """
    result: list[list[PackedBatch]] = []
    cp_size, length_multiple, offset = spec.cp_size, spec.padded_multiple, 0
    for samples, weights in zip(mini_batches, token_weights, strict=True):
        units = _units(samples, spec)
        lengths = [_num_tokens([(samples[i], segment) for i, _, segment in unit], cp_size) for unit in units]
        ranks = balance(lengths, spec)
        longest = max(sum(lengths[i] for i in members) for micro_batches in ranks for members in micro_batches)
        num_tokens = max(1, -(-longest // length_multiple)) * length_multiple
        chosen = [[row for unit in members for row in units[unit]] for members in ranks[spec.dp_rank]]
        rows = [_pack_one(samples, weights, members, offset, num_tokens * cp_size, spec) for members in chosen]
        result.append([part_of(row, cp_size, spec.cp_rank) for row in rows] if cp_size > 1 else rows)
        offset += len(samples)
    return result


def balance(lengths: Sequence[int], spec: PackingSpec) -> list[list[list[int]]]:
    """Return [dp_rank][micro_batch] -> ascending indices into `lengths`, with the fewest micro-batches that the budget
    allows.

    `lengths` are tokens of one context-parallel rank. The number of micro-batches per rank is a positive multiple of
    `micro_batch_multiple`. Bins are evened out until the caller's rounding of the longest to `padded_multiple` hides
    the rest. Raise PlanError if a length exceeds the budget.
    """
    token_budget, multiple = spec.token_budget, spec.dp_size * spec.micro_batch_multiple
    if (longest := max(lengths, default=0)) > token_budget:
        raise PlanError(
            f"a sample of {longest} tokens (number {list(lengths).index(longest)} of its mini-batch) does not fit into "
            f"batch.tokens_per_micro_batch={token_budget}; raise it to at least {longest}, or lower "
            "data.max_prompt_length or rollout.max_response_length"
        )
    lengths_N = np.array(lengths, dtype=np.int64)
    # Lower bounds: the bins for all tokens together, and one bin per sample that is longer than half of the budget.
    num_needed = max(-(-int(lengths_N.sum()) // token_budget), int((2 * lengths_N > token_budget).sum()))
    num_bins = multiple * max(1, -(-num_needed // multiple))
    while True:
        bin_of_N = _even_bins(lengths_N, num_bins, token_budget, spec.padded_multiple)
        loads_B = _loads(bin_of_N, lengths_N, num_bins)
        if loads_B.max() <= token_budget:
            break
        num_bins += multiple
    ends_B = np.bincount(bin_of_N, minlength=num_bins).cumsum()
    bins = [members.tolist() for members in np.split(np.argsort(bin_of_N, kind="stable"), ends_B[:-1])]
    pairs_B = np.bincount(bin_of_N, weights=lengths_N * (lengths_N + 1) / 2, minlength=num_bins)
    # A length stands for cp_size times as many tokens.
    work_B = loads_B + spec.tokens_per_pair * spec.cp_size * pairs_B
    # Assign each bin, heaviest first, to the rank with the least work so far among ranks that still lack bins.
    heap = [(0.0, rank) for rank in range(spec.dp_size)]
    ranks: list[list[list[int]]] = [[] for _ in range(spec.dp_size)]
    for b in np.argsort(-work_B, kind="stable").tolist():
        work, rank = heapq.heappop(heap)
        ranks[rank].append(bins[b])
        if len(ranks[rank]) < num_bins // spec.dp_size:
            heapq.heappush(heap, (work + float(work_B[b]), rank))
    return ranks


def _even_bins(lengths_N: Ints, num_bins: int, token_budget: int, length_multiple: int) -> Ints:
    """Return the bin of each sample, with the longest bin about as short as possible. It may still exceed the
    budget.
    """
    order_N = np.argsort(-lengths_N, kind="stable")
    falling_N = lengths_N[order_N]
    least = int(falling_N.max(initial=0))
    even = [max(least, int(falling_N.sum() / num_bins * (1 + share))) for share in CLOSE_ENOUGH]
    # Longest processing time first: each length, in falling order, goes into the lightest bin.
    heap = list(range(num_bins))  # load * num_bins + bin, so only integers are compared
    bins: list[int] = []
    for added in (falling_N * num_bins).tolist():
        bins.append(heap[0] % num_bins)
        heapq.heapreplace(heap, heap[0] + added)
    bin_of_N = np.array(bins, dtype=np.int64)
    targets = [min(token_budget, -(-n // length_multiple) * length_multiple) for n in even]
    # Exchange samples between bins until no bin is longer than a target. Each target gets MAX_ROUNDS rounds.
    loads_B = _loads(bin_of_N, falling_N, num_bins)
    counts_B = np.bincount(bin_of_N, minlength=num_bins)
    by_bin_N = np.argsort(bin_of_N, kind="stable")
    slot_S = np.arange(min(NUM_MOVABLE, int(counts_B.max())) + 1)  # at least one slot of each bin is empty
    places_BS = counts_B.cumsum()[:, None] - 1 - slot_S  # a bin's last samples are its shortest
    is_sample_BS = (slot_S < counts_B[:, None]) & (slot_S < NUM_MOVABLE)
    # The movable samples of each bin, and -1 in empty slots.
    slots_BS = np.where(is_sample_BS, np.append(by_bin_N, -1)[np.where(is_sample_BS, places_BS, -1)], -1)
    # An empty slot has size 0, so an exchange with it is a move.
    sizes_BS = np.append(falling_N, 0)[slots_BS].astype(np.int32)
    for target in targets:
        num_idle = 0  # rounds without an exchange; after one round per bin all pairs have met
        for round_index in range(MAX_ROUNDS):
            if loads_B.max() <= target or num_idle == num_bins:
                break
            num_idle = 0 if _exchange(loads_B, slots_BS, sizes_BS, target, round_index) else num_idle + 1
    bins_I, slots_I = np.nonzero(slots_BS >= 0)
    bin_of_N[slots_BS[bins_I, slots_I]] = bins_I
    result_N = np.empty_like(bin_of_N)
    result_N[order_N] = bin_of_N
    return result_N


def _loads(bin_of_N: Ints, lengths_N: Ints, num_bins: int) -> Ints:
    """Return the tokens of each bin."""
    return np.bincount(bin_of_N, weights=lengths_N, minlength=num_bins).astype(np.int64)


def _exchange(loads_B: Ints, slots_BS: Ints, sizes_BS: NDArray[np.int32], target: int, round_index: int) -> int:
    """Run one round and return the number of exchanges.

    Each bin longer than `target` considers some of the short bins, different ones in every round. It exchanges two
    samples, or moves one, to make the longer of both bins as short as possible, but only if that bin becomes shorter
    than before.
    """
    num_bins, num_slots = slots_BS.shape
    order_B = np.argsort(-loads_B, kind="stable")
    num_long = min(int((loads_B > target).sum()), num_bins // 2)
    num_partners = min(NUM_PARTNERS, num_bins // max(1, num_long) - 1)
    if num_long == 0 or num_partners == 0:
        return 0
    long_P = order_B[:num_long]
    short_PK = (
        np.roll(order_B[num_long:][::-1], -round_index)[: num_long * num_partners].reshape(num_partners, num_long).T
    )
    given_PKSS = sizes_BS[long_P][:, None, :, None] - sizes_BS[short_PK][:, :, None, :]
    loads_P, loads_PK = loads_B[long_P].astype(np.int32), loads_B[short_PK].astype(np.int32)
    longer_PKSS = np.maximum(loads_P[:, None, None, None] - given_PKSS, loads_PK[:, :, None, None] + given_PKSS)
    longer_PE = longer_PKSS.reshape(num_long, -1)
    best_P = longer_PE.argmin(axis=1)
    better_I = np.flatnonzero(longer_PE[np.arange(num_long), best_P] < loads_P)
    partner_I, from_I, to_I = np.unravel_index(best_P[better_I], (num_partners, num_slots, num_slots))
    long_I, short_I = long_P[better_I], short_PK[better_I, partner_I]
    given_I = sizes_BS[long_I, from_I] - sizes_BS[short_I, to_I]
    loads_B[long_I] -= given_I
    loads_B[short_I] += given_I
    for table_BS in (slots_BS, sizes_BS):
        kept_I = table_BS[long_I, from_I]
        table_BS[long_I, from_I] = table_BS[short_I, to_I]
        table_BS[short_I, to_I] = kept_I
    return len(better_I)


def _units(samples: Sequence[Sample], spec: PackingSpec) -> list[list[Row]]:
    """Return the rows by unit; a unit must be in one micro-batch.

    A unit is a run of samples that share their prompt, as many as fit into a micro-batch, or a sample, or a segment.
    """
    units: list[list[Row]] = []
    run: list[Row] = []
    for i, sample in enumerate(samples):
        rows = [(i, number, segment) for number, segment in enumerate(sample.segments())]
        if not shares_prompt(sample):
            units += [rows] if spec.keeps_samples_whole else [[row] for row in rows]
            continue
        longer = [(samples[j], segment) for j, _, segment in (*run, *rows)]
        is_run = spec.share_prompts and longer[0][0].prompt.id == sample.prompt.id
        if run and is_run and _num_tokens(longer) <= spec.token_budget:
            run += rows
        else:
            run = rows
            units.append(run)
    return units


def _pack_one(
    samples: Sequence[Sample],
    weights: Sequence[float],
    rows: list[Row],
    offset: int,
    num_tokens: int,
    spec: PackingSpec,
) -> PackedBatch:
    """Pack the rows into `num_tokens` tokens, each padded so that context-parallel ranks can share it.

    `offset` is the index of samples[0] in the step.
    """
    tokens, targets, position_ids = torch.zeros(3, num_tokens, dtype=torch.int64).unbind()
    loss_mask, loss_weights, advantages, rollout_logprobs = torch.zeros(4, num_tokens).unbind()
    boundaries = [0]
    for member, _, segment in rows:
        sample, start, part = samples[member], boundaries[-1], slice(segment.start, segment.end)
        is_shared = spec.share_prompts and shares_prompt(sample)
        context = segment.context_ids[-1:] if is_shared else segment.context_ids
        first = start + len(context)
        end = first + segment.end - segment.start
        length = tokens_on_rank(end - start, spec.cp_size) * spec.cp_size
        assert len(sample.rollout_logprobs) == sample.response_len, f"sample {offset + member} lacks rollout_logprobs"
        tokens[start:first] = torch.tensor(context)
        tokens[first:end] = torch.from_numpy(np.asarray(sample.response_ids[part], dtype=np.int64))
        targets[start : end - 1] = tokens[start + 1 : end]
        position_ids[start : start + length] = torch.arange(length) + len(segment.context_ids) - len(context)
        response, is_sampled = response_slice(start, segment, is_shared=is_shared), sampled_mask(sample)[part]
        loss_mask[response] = float(weights[member] != 0) * is_sampled
        loss_weights[response] = weights[member] * is_sampled
        advantages[response] = torch.nan if sample.advantages is None else sample.advantages[part]
        rollout_logprobs[response] = torch.from_numpy(np.asarray(sample.rollout_logprobs[part], dtype=np.float32))
        boundaries.append(start + length)
    of_rows = [samples[member] for member, _, _ in rows]
    segments = _lay_prompts(of_rows, tokens, position_ids, boundaries) if spec.share_prompts else None
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
        sample_indices=[offset + member for member, _, _ in rows],
        segment_numbers=[number for _, number, _ in rows],
        lengths=[segment.num_tokens for _, _, segment in rows],
        shared_prompt_segments=segments,
    )


def _lay_prompts(samples: Sequence[Sample], tokens: Tensor, position_ids: Tensor, boundaries: list[int]) -> list[int]:
    """Append each shared prompt (all but its last token) after the samples. Return, per row, its shared segment or -1.

    `samples` contains each row's sample.
    """
    segment_of: dict[int, int] = {}
    for prompt in {sample.prompt.id: sample.prompt for sample in samples if shares_prompt(sample)}.values():
        start, length = boundaries[-1], len(prompt.token_ids) - 1
        segment_of[prompt.id] = len(boundaries) - 1 if length else -1
        if length:
            tokens[start : start + length] = torch.tensor(prompt.token_ids[:-1])
            position_ids[start : start + length] = torch.arange(length)
            boundaries.append(start + length)
    return [segment_of[sample.prompt.id] if shares_prompt(sample) else -1 for sample in samples]


def _num_tokens(rows: Sequence[tuple[Sample, Segment]], cp_size: int = 1) -> int:
    """Return the number of tokens per context-parallel rank of a unit.

    If it has several samples, they share their prompt. The prompt counts once, its last token once per sample.
    """
    first = rows[0][0]
    if rows[-1][0] is first:
        return sum(tokens_on_rank(segment.num_tokens, cp_size) for _, segment in rows)
    return len(first.prompt.token_ids) - 1 + sum(1 + sample.response_len for sample, _ in rows)
