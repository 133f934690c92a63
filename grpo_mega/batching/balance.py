"""Spreads samples over the micro-batches of all data-parallel ranks, by their numbers of tokens.

In: the lengths of one mini-batch's samples. Out: for each rank, for each micro-batch, the indices of its samples. Every rank
has the same number of micro-batches, none over the token budget; some may be empty. A pure function of its arguments, so that
all ranks find the same plan without talking.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from grpo_mega.errors import PlanError


def balance(lengths: Sequence[int], *, dp_size: int, token_budget: int, micro_batch_multiple: int = 1) -> list[list[list[int]]]:
    """[dp_rank][micro_batch] -> indices into `lengths`, ascending; as few micro-batches a rank as the budget allows.

    The number of micro-batches is a multiple of `micro_batch_multiple`, and at least that. Raises PlanError for a length over
    the budget.
    """
    _check_budget(lengths, token_budget)
    num_bins = dp_size * micro_batch_multiple
    # No fewer bins can do: neither for all tokens together, nor for samples of which no two share a bin.
    num_large = sum(2 * length > token_budget for length in lengths)
    num_needed = max(-(-sum(lengths) // token_budget), num_large)
    num_bins *= max(1, -(-num_needed // num_bins))
    while (bins := longest_first(lengths, num_bins, token_budget)) is None:
        num_bins += dp_size * micro_batch_multiple
    return _deal(bins, lengths, dp_size)


def longest_first(lengths: Sequence[int], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Longest processing time first: each length, in falling order, to the lightest bin. None if a bin overflows."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]  # (load, bin), already a heap
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heap[0]
        if load + lengths[index] > capacity:
            return None
        bins[b].append(index)
        heapq.heapreplace(heap, (load + lengths[index], b))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], dp_size: int) -> list[list[list[int]]]:
    """Gives each rank one bin a round, heaviest first, in turning order: ranks then work alike within each round and in all."""
    loads = [sum(lengths[i] for i in members) for members in bins]
    order = sorted(range(len(bins)), key=lambda b: (-loads[b], b))
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for round_index, begin in enumerate(range(0, len(order), dp_size)):
        turn = range(dp_size) if round_index % 2 == 0 else reversed(range(dp_size))
        for rank, b in zip(turn, order[begin : begin + dp_size], strict=True):
            ranks[rank].append(sorted(bins[b]))
    return ranks


def _check_budget(lengths: Sequence[int], token_budget: int) -> None:
    longest = max(lengths, default=0)
    if longest > token_budget:
        raise PlanError(
            f"a sample of {longest} tokens (number {list(lengths).index(longest)} of its mini-batch) does not fit into "
            f"batch.tokens_per_micro_batch={token_budget}; raise it to at least {longest}, or lower "
            "data.max_prompt_length or rollout.max_response_length"
        )
