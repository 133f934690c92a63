"""Token weights: a batch of three responses worked out by hand."""

import pytest

from grpo_mega.algorithm.token_weights import token_weights

LENGTHS = [2, 5, 3]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token-mean", [0.1, 0.1, 0.1]),
        ("seq-mean-token-mean", [1 / 6, 1 / 15, 1 / 9]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-sum-norm", [1 / 24, 1 / 24, 1 / 24]),
    ],
)
def test_weights_have_the_values_worked_out_by_hand(kind, expected):
    weights = token_weights(LENGTHS, kind, max_response_length=8, num_samples=3, num_tokens=10)
    assert weights == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("kind", ["token-mean", "seq-mean-token-mean"])
def test_the_weights_of_all_tokens_of_a_mean_sum_to_one(kind):
    weights = token_weights(LENGTHS, kind, max_response_length=8, num_samples=3, num_tokens=10)
    assert sum(w * n for w, n in zip(weights, LENGTHS, strict=True)) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_empty_responses_have_weight_zero(kind):
    assert token_weights([0, 0], kind, max_response_length=8, num_samples=2, num_tokens=0) == [0.0, 0.0]
    assert token_weights([0, 4], kind, max_response_length=8, num_samples=2, num_tokens=4)[0] == 0.0
