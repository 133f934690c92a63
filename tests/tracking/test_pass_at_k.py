"""pass@k, mean@k and majority@k, compared with the mean over all subsets of k responses."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations
from math import comb
from random import Random

import pytest

from grpo_mega.tracking.metrics import estimate_pass_at_k, majority_at_k, sampled_metrics, tally

Responses = list[tuple[str, bool]]  # (answer, whether it is correct)


def random_responses(random: Random) -> Responses:
    """Return up to 9 responses with few distinct answers. Some have no answer. Equal answers may differ in
    correctness.
    """
    sure = {answer: random.random() < 0.4 for answer in "abcd"}
    found = []
    for _ in range(random.randint(1, 9)):
        answer = random.choice(["", *"abcd"][: random.randint(1, 5)])
        found.append((answer, bool(answer) and (sure[answer] if random.random() < 0.8 else random.random() < 0.5)))
    return found


def by_subsets(responses: Responses, k: int) -> tuple[Fraction, Fraction, Fraction]:
    """Return pass@k, mean@k and majority@k by their definitions, as means over subsets."""
    subsets = list(combinations(responses, k))
    passed = sum(any(right for _, right in subset) for subset in subsets)
    right = sum(Fraction(sum(right for _, right in subset), k) for subset in subsets)
    return Fraction(passed, len(subsets)), right / len(subsets), sum(map(vote, subsets), Fraction(0)) / len(subsets)


def vote(subset: tuple[tuple[str, bool], ...]) -> Fraction:
    counts = Counter(answer for answer, _ in subset if answer)
    if not counts:
        return Fraction(0)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    worths = [Fraction(sum(right for answer, right in subset if answer == w), counts[w]) for w in winners]
    return sum(worths, Fraction(0)) / len(winners)


@pytest.mark.parametrize("seed", range(60))
def test_estimates_are_the_means_over_all_subsets(seed: int) -> None:
    responses = random_responses(Random(seed))
    found = tally([answer for answer, _ in responses], [right for _, right in responses])
    n = len(responses)
    for k in range(1, n + 1):
        passed, mean, majority = by_subsets(responses, k)
        assert estimate_pass_at_k(n, found.num_correct, k) == pytest.approx(float(passed), abs=1e-12)
        assert sampled_metrics([found], [])[f"mean@{n}"] == pytest.approx(float(mean), abs=1e-12)
        assert majority_at_k(n, found.votes, k) == pytest.approx(float(majority), abs=1e-12)


def test_a_large_n_is_neither_slow_nor_inexact() -> None:
    n, k = 128, 64
    assert estimate_pass_at_k(n, 4, k) == 1 - comb(124, 64) / comb(128, 64)
    # The other 100 answers have one response each: two of the 28 responses win, a single one ties with 63 others.
    none, one = comb(100, 64), 28 * comb(100, 63)
    expected = 1 - Fraction(none + one, comb(n, k)) + Fraction(one, comb(n, k)) / 64
    assert majority_at_k(n, ((1, 0),) * 100 + ((28, 28),), k) == pytest.approx(float(expected), abs=1e-14)
    assert majority_at_k(n, ((64, 0), (64, 64)), k) == pytest.approx(0.5, abs=1e-14)
    won = sum(comb(624, j) * comb(400, 256 - j) * (2 if j > 128 else 1) for j in range(128, 257))
    expected = Fraction(won, 2 * comb(1024, 256))
    assert majority_at_k(1024, ((400, 0), (624, 624)), 256) == pytest.approx(float(expected), abs=1e-12)


def test_a_tie_is_worth_the_mean_of_the_tied_answers() -> None:
    assert majority_at_k(4, ((2, 0), (2, 2)), 4) == 0.5
    assert majority_at_k(3, ((1, 0), (1, 0), (1, 1)), 3) == pytest.approx(1 / 3)


def test_responses_without_an_answer_do_not_vote() -> None:
    found = tally(["", "", "7"], [False, False, True])
    assert majority_at_k(3, found.votes, 3) == 1.0
    assert majority_at_k(3, found.votes, 1) == pytest.approx(1 / 3)
    assert majority_at_k(3, tally(["", "", ""], [False] * 3).votes, 2) == 0.0


def test_metrics_are_means_over_prompts_with_easy_and_unsolved_shares() -> None:
    tallies = [tally(["1", "1"], [True, True]), tally(["1", "2"], [True, False]), tally(["", "3"], [False, False])]
    assert sampled_metrics(tallies, [1, 2]) == pytest.approx(
        {
            "mean@2": 0.5,
            "pass@1": 0.5,
            "majority@1": 0.5,
            "pass@2": 2 / 3,
            "majority@2": 0.5,
            "never_solved": 1 / 3,
            "always_solved": 1 / 3,
        }
    )
    assert sampled_metrics([], [1]) == {}
