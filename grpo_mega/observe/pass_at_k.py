"""Unbiased estimates of pass@k, mean@k and majority@k from n responses to a prompt.

pass@k      the probability that at least one of k responses is correct: 1 - C(n - c, k) / C(n, k) with c of n correct
            (Chen et al. 2021, arXiv 2107.03374, eq. 1)
mean@k      the expected share of correct responses among k, equal to c / n for every k
majority@k  the probability that the most frequent answer among k responses is correct. Responses vote with the text of
            their answer; a response without an answer does not vote. Ties are broken by a random draw. Without any vote
            the result is incorrect.

Each is the exact mean over all C(n, k) subsets, so a smaller k needs no further samples and adds no noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np

from grpo_mega.types import StepMetrics

# Sorted pairs, one per answer: (number of responses with the answer, number of correct responses among them).
Votes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Tally:
    """Counts of the responses to one prompt."""

    num_samples: int
    num_correct: int
    votes: Votes


def tally(answers: Sequence[str], is_correct: Sequence[bool]) -> Tally:
    """Count the votes of responses, from the answer of each as text ("" for none) and whether it is correct."""
    counts: dict[str, list[int]] = {}
    for answer, right in zip(answers, is_correct, strict=True):
        if answer:
            count = counts.setdefault(answer, [0, 0])
            count[0] += 1
            count[1] += right
    return Tally(len(answers), sum(is_correct), tuple(sorted((given, right) for given, right in counts.values())))


def sampled_metrics(tallies: Sequence[Tally], ks: Sequence[int]) -> StepMetrics:
    """Return "mean@<n>", then "pass@<k>" and "majority@<k>" for each k, over prompts with n responses each.

    Also return the shares of prompts that were "never_solved" and "always_solved".
    """
    if not tallies:
        return {}
    n = tallies[0].num_samples
    metrics = {f"mean@{n}": _mean([t.num_correct / n for t in tallies])}
    for k in ks:
        metrics[f"pass@{k}"] = _mean([estimate_pass_at_k(t.num_samples, t.num_correct, k) for t in tallies])
        metrics[f"majority@{k}"] = _mean([majority_at_k(t.num_samples, t.votes, k) for t in tallies])
    metrics["never_solved"] = _mean([float(t.num_correct == 0) for t in tallies])
    metrics["always_solved"] = _mean([float(t.num_correct == t.num_samples) for t in tallies])
    return metrics


def estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """Return pass@k if c of n responses are correct, 1 <= k <= n."""
    assert 0 <= c <= n and 1 <= k <= n, (n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


@lru_cache(maxsize=65536)  # few different tallies occur in a set of prompts
def majority_at_k(n: int, votes: Votes, k: int) -> float:
    """Return majority@k of n responses, 1 <= k <= n; the responses in `votes` have an answer.

    For each t, count the subsets in which the winners have t votes. If an answer is correct in r of its m responses (r
    is 0 or m if correctness depends only on the answer), a response with this answer in a subset is correct with
    probability r / m.
    """
    assert sum(m for m, _ in votes) <= n and 1 <= k <= n, (n, votes, k)
    if not any(right for _, right in votes):
        return 0.0
    num_silent = n - sum(m for m, _ in votes)
    total = 0.0
    for t in range(1, min(k, max(m for m, _ in votes)) + 1):
        worth = _worths(votes, k, t)
        silent = np.array([comb(num_silent, k - size) for size in range(k + 1)], dtype=np.float64)
        num_tied = np.arange(1, worth.shape[1])
        total += float(((silent @ worth)[1:] / num_tied).sum())
    return total / comb(n, k)


def _worths(votes: Votes, k: int, t: int) -> np.ndarray:
    """Return [k + 1, k // t + 1] sums of r / m over the answers with t votes.

    Each entry sums over the subsets of voting responses in which no answer has more than t votes. The indices are the
    size of the subset and the number of answers with t votes.
    """
    shape = (k + 1, k // t + 1)
    ways, worth = np.zeros(shape), np.zeros(shape)
    ways[0, 0] = 1.0
    for m, right in votes:
        new_ways, new_worth = ways.copy(), worth.copy()  # subsets without a response with this answer
        for taken in range(1, min(m, t) + 1):
            choices, is_tied = float(comb(m, taken)), int(taken == t)
            fewer = slice(k + 1 - taken), slice(shape[1] - is_tied)
            new_ways[taken:, is_tied:] += choices * ways[fewer]
            new_worth[taken:, is_tied:] += choices * (worth[fewer] + is_tied * right / m * ways[fewer])
        ways, worth = new_ways, new_worth
    return worth


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
