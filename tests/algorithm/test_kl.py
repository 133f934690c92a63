"""KL penalties: values worked out by hand, numeric gradients, and the float32 accuracy that k3 needs."""

import math

import pytest
import torch

from grpo_mega.algorithm.kl import adapted_beta, k3, kl_penalty
from grpo_mega.config import AlgorithmConfig

KINDS = ["kl", "abs", "mse", "low_var_kl"]


@pytest.mark.parametrize(
    ("kind", "expected"), [("kl", 0.5), ("abs", 0.5), ("mse", 0.125), ("low_var_kl", math.exp(-0.5) - 1 + 0.5)]
)
def test_penalties_have_the_values_worked_out_by_hand(kind, expected):
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    ref_logprobs = torch.tensor([-1.5, -2.0], dtype=torch.float64)
    torch.testing.assert_close(
        kl_penalty(logprobs, ref_logprobs, kind),
        torch.tensor([expected, 0.0], dtype=torch.float64),
        rtol=1e-14,
        atol=1e-16,
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


def test_k3_is_clamped_so_one_token_cannot_dominate_the_step():
    logprobs = torch.tensor([-100.0, -3.0, -torch.inf], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([0.0, 0.0, -1.0]), "low_var_kl")
    assert penalty.tolist() == [10.0, 10.0, 10.0]
    penalty.sum().backward()
    assert logprobs.grad.tolist() == [0.0, 0.0, 0.0]


def test_the_means_of_k1_and_k3_over_policy_samples_are_the_kl_divergence():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    divergence = (policy * (policy / reference).log()).sum()
    for kind in ["kl", "low_var_kl"]:
        torch.testing.assert_close(policy @ kl_penalty(policy.log(), reference.log(), kind), divergence)


def test_the_weighted_k3_has_mean_and_gradient_of_the_kl_divergence():
    """Tokens are drawn from the policy before the update. The current policy differs from it."""
    reference = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    old = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logits = torch.tensor([0.1, -0.4, 0.3], dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(dim=0)
    mean = old.exp() @ kl_penalty(logprobs, reference, "low_var_kl_weighted", old_logprobs=old)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    torch.testing.assert_close(mean, divergence, rtol=1e-12, atol=0)
    (ours,) = torch.autograd.grad(mean, logits, retain_graph=True)
    (exact,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)


# Log-probs minus reference log-probs, and minus old log-probs. Values go beyond every clamp but never lie on its
# boundary.
GAPS = torch.arange(-30.0, 30.05, 0.1, dtype=torch.float64) + 0.013
MOVES = torch.tensor([-25.0, -18.0, -7.0, -2.6, -0.8, 0.0, 0.5, 2.2, 9.0, 23.0], dtype=torch.float64) + 0.007


def penalties_and_slopes(kind, kl_clamp=10.0):
    """Return gaps, moves, values, autograd gradients and central differences, each [len(GAPS), len(MOVES)] in
    float64.
    """
    gaps, moves = (values.contiguous() for values in torch.broadcast_tensors(GAPS[:, None], MOVES))
    logprobs = torch.full_like(gaps, -1.5, requires_grad=True)

    def penalty(x):
        reference, old = (-1.5 - gaps), (-1.5 - moves)
        return kl_penalty(x, reference, kind, old_logprobs=old, kl_clamp=kl_clamp)

    values = penalty(logprobs)
    (gradients,) = torch.autograd.grad(values.sum(), logprobs)
    with torch.no_grad():
        differences = (penalty(logprobs + 1e-6) - penalty(logprobs - 1e-6)) / 2e-6
    return gaps, moves, values.detach(), gradients, differences


@pytest.mark.parametrize("kl_clamp", [10.0, 0.3, None])
@pytest.mark.parametrize("kind", [*KINDS, "low_var_kl_weighted"])
def test_no_penalty_pushes_away_from_the_reference(kind, kl_clamp):
    """A gradient step never moves a log-prob away from the reference log-prob."""
    gaps, _, values, gradients, differences = penalties_and_slopes(kind, kl_clamp)
    if kind != "kl":  # k1 always pulls in one direction
        assert (gradients * gaps >= 0).all()
    # Beyond 20, only the gradient treats the ratio as constant.
    within = (gaps.abs() < 20) | (kind != "low_var_kl_weighted")
    # Resolution of differences of large values.
    scale = torch.maximum(differences.abs().clamp(min=1.0), 1e-5 * values.abs())
    torch.testing.assert_close((gradients / scale)[within], (differences / scale)[within], rtol=0, atol=1e-3)


def test_the_weighted_k3_equals_slime_and_clamps_the_product():
    """slime with --use-unbiased-kl and low_var_kl: min(r (e^-d - 1 + d), 10). The gradient is r d below the clamp, else
    0.
    """
    gaps, moves, values, gradients, _ = penalties_and_slopes("low_var_kl_weighted")
    product = moves.exp() * ((-gaps).exp() - 1 + gaps)
    expected = torch.where(product > 10, torch.zeros_like(gaps), moves.exp() * gaps)
    is_within = (gaps.abs() < 20) & (moves.abs() < 20)  # beyond 20 our code clamps the logarithms, slime does not
    assert ((product < 9) & ((-gaps).exp() > 11)).any() and ((product > 11) & ((-gaps).exp() < 9)).any()
    torch.testing.assert_close(values[is_within], product.clamp(max=10)[is_within], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients[is_within], expected[is_within], rtol=1e-7, atol=1e-9)


def test_the_clamp_of_k3_can_be_changed_and_removed():
    logprobs, reference = torch.tensor([-6.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    exact = math.exp(6) - 1 - 6
    assert kl_penalty(logprobs, reference, "low_var_kl", kl_clamp=25.0).item() == 25.0
    assert kl_penalty(logprobs, reference, "low_var_kl", kl_clamp=None).item() == pytest.approx(exact, rel=1e-12)
    assert kl_penalty(logprobs - 100, reference, "low_var_kl", kl_clamp=None).item() < math.exp(20)


# Ziegler et al. (arXiv 1909.08593), section 2.2, worked by hand for a target of 0.05, a horizon of 7,000 and a beta of
# 0.3: The relative error of the KL, clipped to +-0.2, times 350 / 7,000 = 0.05 is the relative change of beta.
@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.05, 0.3),  # the KL is at the target
        (0.0505, 0.3 * (1 + 0.01 * 0.05)),  # 1% above the target
        (0.0495, 0.3 * (1 - 0.01 * 0.05)),
        (0.0595, 0.3 * (1 + 0.19 * 0.05)),  # just inside the clip range
        (0.0405, 0.3 * (1 - 0.19 * 0.05)),
        (0.0605, 0.303),  # just outside the clip range: 0.3 (1 + 0.2 * 0.05)
        (0.0395, 0.297),
        (0.09, 0.303),  # far above, the change stays clipped
        (1e6, 0.303),
        (0.0, 0.297),
        (-0.02, 0.297),  # KL estimates may be negative
        (math.nan, 0.3),
        (math.inf, 0.3),
        (-math.inf, 0.3),
    ],
)
def test_beta_changes_by_the_clipped_relative_error_of_the_kl(kl, expected):
    # kl_beta is the start value, not the current value.
    a = AlgorithmConfig(kl_beta=0.9, kl_target=0.05, kl_horizon=7000.0)
    assert adapted_beta(0.3, kl, 350, a) == pytest.approx(expected, rel=1e-12)


def test_beta_changes_in_proportion_to_samples_over_the_horizon():
    a = AlgorithmConfig(kl_beta=0.9, kl_target=0.05, kl_horizon=7000.0)
    assert adapted_beta(0.3, 0.053, 700, a) == pytest.approx(0.3 * (1 + 0.06 * 0.1), rel=1e-12)
    half = a.model_copy(update={"kl_horizon": 3500.0})
    assert adapted_beta(0.3, 0.053, 350, half) == pytest.approx(0.3 * (1 + 0.06 * 0.1), rel=1e-12)
    assert adapted_beta(0.3, 0.5, 350, AlgorithmConfig(kl_beta=0.9)) == 0.3  # without a target beta is constant
