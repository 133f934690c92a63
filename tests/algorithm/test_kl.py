"""KL penalties: values by hand, gradients against numeric ones, and the float32 accuracy that k3 needs."""

import math

import pytest
import torch

from grpo_mega.algorithm.kl import k3, kl_penalty

KINDS = ["kl", "abs", "mse", "low_var_kl"]


@pytest.mark.parametrize(
    ("kind", "expected"), [("kl", 0.5), ("abs", 0.5), ("mse", 0.125), ("low_var_kl", math.exp(-0.5) - 1 + 0.5)]
)
def test_penalties_have_their_values_worked_by_hand(kind, expected):
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    ref_logprobs = torch.tensor([-1.5, -2.0], dtype=torch.float64)
    torch.testing.assert_close(
        kl_penalty(logprobs, ref_logprobs, kind), torch.tensor([expected, 0.0], dtype=torch.float64), rtol=1e-14, atol=1e-16
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_numeric_gradients(kind):
    logprobs = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.tensor([-1.5, -0.1, -1.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref_logprobs, kind), logprobs)


@pytest.mark.parametrize("difference", [1e-4, 3e-4, 1e-3, 1e-2, -1e-3])
def test_k3_is_accurate_in_float32_for_small_differences(difference):
    exact = math.expm1(difference) - difference
    d = torch.tensor(difference, dtype=torch.float64).float()
    assert k3(d).item() == pytest.approx(exact, rel=2e-3)


def test_k3_is_clamped_so_that_one_token_cannot_decide_the_step():
    logprobs = torch.tensor([-100.0, -3.0, -torch.inf], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([0.0, 0.0, -1.0]), "low_var_kl")
    assert penalty.tolist() == [10.0, 10.0, 10.0]
    penalty.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_the_mean_of_k1_and_of_k3_over_samples_of_the_policy_is_the_kl_divergence():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    divergence = (policy * (policy / reference).log()).sum()
    for kind in ["kl", "low_var_kl"]:
        torch.testing.assert_close(policy @ kl_penalty(policy.log(), reference.log(), kind), divergence)
