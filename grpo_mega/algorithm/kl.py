"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens. Pure and differentiable.

Input: logprobs and ref_logprobs of the same shape. Output: a penalty of that shape, 0 if both agree. `adapted_beta` adapts the
penalty's weight between steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import MAX_LOG_RATIO
from grpo_mega.config.algorithm import KL_CLAMP, AlgorithmConfig, KLPenalty


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: KLPenalty,
    *,
    old_logprobs: Tensor | None = None,
    kl_clamp: float | None = KL_CLAMP,
) -> Tensor:
    """Return the penalty `kind` for d = logprobs - ref_logprobs (k1, k2, k3: Schulman, "Approximating KL Divergence", 2020).

    kl          k1 = d. As a loss its gradient has mean 0 over the policy's own samples: for monitoring, or for rewards
    abs         |d|
    mse         k2 = d^2 / 2
    low_var_kl  k3 = e^-d - 1 + d, DeepSeekMath (arXiv 2402.03300) eq. 4; d clamped to +-20, the value to at most kl_clamp
    low_var_kl_weighted  r k3 with r = e^(logprobs - old_logprobs), DeepSeek-V3.2's unbiased estimate (arXiv 2512.02556). Over
                samples of the policy before the update its mean is the KL of the current policy, and its gradient is that
                KL's gradient. The ratio has a gradient. d and log r are clamped to +-20, the product to at most kl_clamp
    low_var_kl+  the value of low_var_kl with the gradient of mse, d: straight-through, as in verl. The mean of k3 is the KL
                with little variance, and on-policy the mean gradient of k2 is the KL's gradient; each has only one of the two

    The gradient of every penalty is 0 or points towards the reference. For r k3 it is r d. A clamp on k3 alone would leave the
    ratio's gradient, and that lowers log-probs that are already below the reference. kl_clamp None clamps only d and log r.
    """
    if kind == "kl":
        return logprobs - ref_logprobs
    if kind == "abs":
        return (logprobs - ref_logprobs).abs()
    if kind == "mse":
        return 0.5 * (logprobs - ref_logprobs).square()
    distance = ref_logprobs - logprobs
    penalty = k3(distance)
    if kind == "low_var_kl+":
        square = 0.5 * distance.square()
        return penalty.detach().clamp(max=math.inf if kl_clamp is None else kl_clamp) + square - square.detach()
    if kind == "low_var_kl_weighted":
        assert old_logprobs is not None, kind
        ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        # If the clamp makes k3 a constant, the ratio must be a constant too.
        penalty = torch.where(distance.abs() <= MAX_LOG_RATIO, ratio, ratio.detach()) * penalty
    return penalty if kl_clamp is None else penalty.clamp(max=kl_clamp)


def k3(log_ratio: Tensor) -> Tensor:
    """Return e^d - 1 - d >= 0 for d = log_ratio clamped to +-20.

    For d = log p - log q its mean over samples of q is KL(q || p). It is computed with expm1, because in float32 the plain form
    is off by 5% at d = 1e-3 and meaningless below 3e-4.
    """
    d = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(d) - d


def adapted_beta(beta: float, kl: float, num_samples: int, a: AlgorithmConfig) -> float:
    """Return the weight of the KL penalty after a step with this mean KL (Ziegler et al., arXiv 1909.08593, section 2.2).

    It is beta (1 + clip(kl / kl_target - 1, -0.2, 0.2) num_samples / kl_horizon), or beta if kl is not finite.
    """
    if a.kl_target is None or not math.isfinite(kl):
        return beta
    error = min(max(kl / a.kl_target - 1.0, -0.2), 0.2)
    return beta * (1.0 + error * num_samples / a.kl_horizon)
