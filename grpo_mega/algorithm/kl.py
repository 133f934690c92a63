"""Per-token estimates of KL(policy || reference) from the log-probabilities of sampled tokens; pure and differentiable.

In: logprobs and ref_logprobs of the same shape. Out: a penalty of that shape. All are 0 where both agree.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLPenalty = Literal["kl", "abs", "mse", "low_var_kl"]

# verl's and RLinf's clamps: one token far from the reference must not decide the step.
_MAX_LOG_RATIO = 20.0
_MAX_PENALTY = 10.0


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLPenalty) -> Tensor:
    """The penalty by name (k1, k2, k3 after Schulman, "Approximating KL Divergence", 2020), d = logprobs - ref_logprobs:

    kl          k1 = d. As a loss its gradient has mean 0 over the policy's own samples: for monitoring, or for rewards.
    abs         |d|
    mse         k2 = d^2 / 2
    low_var_kl  k3 = e^-d - 1 + d, DeepSeekMath (arXiv 2402.03300) eq. 4; d clamped to +-20, the value to at most 10
    """
    if kind == "kl":
        return logprobs - ref_logprobs
    if kind == "abs":
        return (logprobs - ref_logprobs).abs()
    if kind == "mse":
        return 0.5 * (logprobs - ref_logprobs).square()
    assert kind == "low_var_kl", kind
    return k3(ref_logprobs - logprobs).clamp(max=_MAX_PENALTY)


def k3(log_ratio: Tensor) -> Tensor:
    """e^d - 1 - d >= 0 of d = log_ratio clamped to +-20; its mean over samples of q is KL(q || p) for d = log p - log q.

    By expm1: in float32 the naive form is 5% off at d = 1e-3 and all wrong below 3e-4.
    """
    d = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(d) - d
