"""Balance samples over the micro-batches of all data-parallel ranks, by number of tokens and by work of attention.

Input: the lengths of one mini-batch's samples. Output: for each rank, for each micro-batch, the indices of its samples. Every
rank has the same number of micro-batches, none over the token budget; some may be empty. All micro-batches are padded to the
longest one (pack.py), so its length is minimised: samples are placed longest first, then exchanged between long and short
micro-batches ("bins"). Equal tokens mean equal work, except in attention, because its work grows with the square of a sample's
length. So bins are dealt to give every rank the same work. The result depends only on the arguments, so all ranks compute the
same plan without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from grpo_mega.errors import PlanError

CLOSE_ENOUGH = (1e-4, 2e-4, 4e-4)  # the longest bin may exceed the mean by these shares, tried in this order
MAX_ROUNDS = 40  # rounds of exchanges per share
NUM_MOVABLE = 11  # the shortest samples of a bin take part in exchanges, because they make the finest differences
NUM_PARTNERS = 24  # short bins that are candidates for each long bin in a round

Ints = NDArray[np.int64]


def balance(
    lengths: Sequence[int],
    *,
    dp_size: int,
    token_budget: int,
    micro_batch_multiple: int = 1,
    length_multiple: int = 1,
    tokens_per_pair: float = 0.0,
) -> list[list[list[int]]]:
    """Return [dp_rank][micro_batch] -> ascending indices into `lengths`, with the fewest micro-batches that the budget allows.

    The number of micro-batches per rank is a positive multiple of `micro_batch_multiple`. Bins are evened out until the
    caller's rounding of the longest to `length_multiple` hides the rest. `tokens_per_pair` is the work of attention for a query
    and a key, relative to all other work for a token. Raise PlanError if a length exceeds the budget.
    """
    _check_budget(lengths, token_budget)
    lengths_N = np.array(lengths, dtype=np.int64)
    num_bins = dp_size * micro_batch_multiple
    # Lower bounds: the bins for all tokens together, and one bin per sample that is longer than half of the budget.
    num_needed = max(-(-int(lengths_N.sum()) // token_budget), int((2 * lengths_N > token_budget).sum()))
    num_bins *= max(1, -(-num_needed // num_bins))
    bin_of_N = even_bins(lengths_N, num_bins, token_budget, length_multiple)
    while (loads_B := loads(bin_of_N, lengths_N, num_bins)).max() > token_budget:
        num_bins += dp_size * micro_batch_multiple
        bin_of_N = even_bins(lengths_N, num_bins, token_budget, length_multiple)
    ends_B = np.bincount(bin_of_N, minlength=num_bins).cumsum()
    bins = [members.tolist() for members in np.split(np.argsort(bin_of_N, kind="stable"), ends_B[:-1])]
    pairs_B = np.bincount(bin_of_N, weights=lengths_N * (lengths_N + 1) / 2, minlength=num_bins)
    return _deal(bins, loads_B + tokens_per_pair * pairs_B, dp_size)


def even_bins(lengths_N: Ints, num_bins: int, token_budget: int, length_multiple: int) -> Ints:
    """Return the bin of each sample, with the longest bin about as short as possible. It may still exceed the budget."""
    order_N = np.argsort(-lengths_N, kind="stable")
    falling_N = lengths_N[order_N]
    least = int(falling_N.max(initial=0))
    even = [max(least, int(falling_N.sum() / num_bins * (1 + share))) for share in CLOSE_ENOUGH]
    bin_of_N = longest_first(falling_N, num_bins)
    even_out(bin_of_N, falling_N, num_bins, [min(token_budget, -(-n // length_multiple) * length_multiple) for n in even])
    result_N = np.empty_like(bin_of_N)
    result_N[order_N] = bin_of_N
    return result_N


def loads(bin_of_N: Ints, lengths_N: Ints, num_bins: int) -> Ints:
    """Return the tokens of each bin."""
    return np.bincount(bin_of_N, weights=lengths_N, minlength=num_bins).astype(np.int64)


def longest_first(falling_N: Ints, num_bins: int) -> Ints:
    """Assign longest processing time first: each length, in falling order, goes into the lightest bin."""
    heap = list(range(num_bins))  # load * num_bins + bin, so only integers are compared
    bins: list[int] = []
    for added in (falling_N * num_bins).tolist():
        lightest = heap[0]
        bins.append(lightest % num_bins)
        heapq.heapreplace(heap, lightest + added)
    return np.array(bins, dtype=np.int64)


def even_out(bin_of_N: Ints, falling_N: Ints, num_bins: int, targets: Sequence[int]) -> None:
    """Exchange samples between bins, in place, until no bin is longer than a target. Each target gets MAX_ROUNDS rounds.

    `falling_N` is sorted in falling order.
    """
    loads_B = loads(bin_of_N, falling_N, num_bins)
    slots_BS = _movable(bin_of_N, num_bins)
    sizes_BS = np.append(falling_N, 0)[slots_BS].astype(np.int32)  # an empty slot has size 0, so an exchange with it is a move
    for target in targets:
        num_idle = 0  # rounds without an exchange; after one round per bin all pairs have met
        for round_index in range(MAX_ROUNDS):
            if loads_B.max() <= target or num_idle == num_bins:
                break
            num_idle = 0 if _exchange(loads_B, slots_BS, sizes_BS, target, round_index) else num_idle + 1
    bins_I, slots_I = np.nonzero(slots_BS >= 0)
    bin_of_N[slots_BS[bins_I, slots_I]] = bins_I


def _exchange(loads_B: Ints, slots_BS: Ints, sizes_BS: NDArray[np.int32], target: int, round_index: int) -> int:
    """Run one round and return the number of exchanges.

    Each bin longer than `target` considers some of the short bins, different ones in every round. It exchanges two samples, or
    moves one, to make the longer of both bins as short as possible, but only if that bin becomes shorter than before.
    """
    num_bins, num_slots = slots_BS.shape
    order_B = np.argsort(-loads_B, kind="stable")
    num_long = min(int((loads_B > target).sum()), num_bins // 2)
    num_partners = min(NUM_PARTNERS, num_bins // max(1, num_long) - 1)
    if num_long == 0 or num_partners == 0:
        return 0
    long_P = order_B[:num_long]
    short_PK = np.roll(order_B[num_long:][::-1], -round_index)[: num_long * num_partners].reshape(num_partners, num_long).T
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


def _movable(bin_of_N: Ints, num_bins: int) -> Ints:
    """Return [bins, slots]: the movable samples of each bin, and -1 in empty slots. At least one slot is empty."""
    counts_B = np.bincount(bin_of_N, minlength=num_bins)
    by_bin_N = np.argsort(bin_of_N, kind="stable")
    slot_S = np.arange(min(NUM_MOVABLE, int(counts_B.max())) + 1)
    places_BS = counts_B.cumsum()[:, None] - 1 - slot_S  # a bin's last samples are its shortest
    is_sample_BS = (slot_S < counts_B[:, None]) & (slot_S < NUM_MOVABLE)
    return np.where(is_sample_BS, np.append(by_bin_N, -1)[np.where(is_sample_BS, places_BS, -1)], -1)


def _deal(bins: list[list[int]], work_B: NDArray[np.float64], dp_size: int) -> list[list[list[int]]]:
    """Assign each bin, heaviest first, to the rank with the least work so far among ranks that still lack bins."""
    heap = [(0.0, rank) for rank in range(dp_size)]
    ranks: list[list[list[int]]] = [[] for _ in range(dp_size)]
    for b in np.argsort(-work_B, kind="stable").tolist():
        work, rank = heapq.heappop(heap)
        ranks[rank].append(bins[b])
        if len(ranks[rank]) < len(bins) // dp_size:
            heapq.heappush(heap, (work + float(work_B[b]), rank))
    return ranks


def _check_budget(lengths: Sequence[int], token_budget: int) -> None:
    longest = max(lengths, default=0)
    if longest > token_budget:
        raise PlanError(
            f"a sample of {longest} tokens (number {list(lengths).index(longest)} of its mini-batch) does not fit into "
            f"batch.tokens_per_micro_batch={token_budget}; raise it to at least {longest}, or lower "
            "data.max_prompt_length or rollout.max_response_length"
        )
