"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens; pure and differentiable.

In: logprobs and ref_logprobs of the same shape. Out: a penalty of that shape. All are 0 where both agree.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLPenalty = Literal["kl", "abs", "mse", "low_var_kl", "low_var_kl_weighted"]

# verl's and RLinf's clamps: one token far from the reference must not decide the step.
_MAX_LOG_RATIO = 20.0
MAX_PENALTY = 10.0


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: KLPenalty,
    *,
    old_logprobs: Tensor | None = None,
    max_penalty: float | None = MAX_PENALTY,
) -> Tensor:
    """The penalty by name (k1, k2, k3 after Schulman, "Approximating KL Divergence", 2020), d = logprobs - ref_logprobs:

    kl          k1 = d. As a loss its gradient has mean 0 over the policy's own samples: for monitoring, or for rewards.
    abs         |d|
    mse         k2 = d^2 / 2
    low_var_kl  k3 = e^-d - 1 + d, DeepSeekMath (arXiv 2402.03300) eq. 4; d clamped to +-20, the value to at most max_penalty
    low_var_kl_weighted  r k3 with r = e^(logprobs - old_logprobs), DeepSeek-V3.2's unbiased estimate (arXiv 2512.02556): over
                samples of the policy before the update its mean is the policy's KL now, and its gradient that KL's. The ratio
                carries gradient; d and log r are clamped to +-20, the product to at most max_penalty

    The gradient of every penalty is 0 or points towards the reference. For r k3 it is r d; a clamp on k3 alone would leave the
    ratio's own gradient, which lowers log-probs that are below the reference already.
    max_penalty None: only d and log r are clamped.
    """
    if kind == "kl":
        return logprobs - ref_logprobs
    if kind == "abs":
        return (logprobs - ref_logprobs).abs()
    if kind == "mse":
        return 0.5 * (logprobs - ref_logprobs).square()
    distance = ref_logprobs - logprobs
    penalty = k3(distance)
    if kind == "low_var_kl_weighted":
        assert old_logprobs is not None, kind
        ratio = (logprobs - old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        # Where the clamp makes k3 a constant, the ratio must be one too.
        penalty = torch.where(distance.abs() <= _MAX_LOG_RATIO, ratio, ratio.detach()) * penalty
    return penalty if max_penalty is None else penalty.clamp(max=max_penalty)


def k3(log_ratio: Tensor) -> Tensor:
    """e^d - 1 - d >= 0 of d = log_ratio clamped to +-20; its mean over samples of q is KL(q || p) for d = log p - log q.

    By expm1: in float32 the naive form is 5% off at d = 1e-3 and all wrong below 3e-4.
    """
    d = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(d) - d
