"""The policy's term of each loss, before weights, KL and entropy: one pure function per method.

Input: the inputs of a micro-batch without masked values (LossInputs.without_masked), and the config's section `algorithm`.
Output: l_t of each token, to be minimised, with gradient. r_t = exp(logprobs_t - old_logprobs_t) is the importance ratio, with
its logarithm clamped to +-20; low and high are a.clip_low and a.clip_high; sg[] stops the gradient. If a method defines one
value per response, every token of the response gets it, so seq-mean-token-mean returns the mean over responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.config import AlgorithmConfig


@dataclass(frozen=True)
class Objective:
    loss: Tensor  # [T], l_t
    is_low: Tensor  # [T] bool: the ratio is so small that the token loses its gradient, or a part of it
    is_high: Tensor  # [T] bool: the ratio is so large that the token loses its gradient, or a part of it


def actor(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return GRPO's clipped objective, DeepSeekMath (arXiv 2402.03300) eq. 3 (eq. 21 if on-policy):

    l_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)

    high > low is DAPO's clip-higher (arXiv 2503.14476, eq. 8).
    """
    return _clipped(x.log_ratio().exp(), x.advantages, a)


def dual_clip(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return PPO's dual clip (arXiv 1912.09729, eq. 5): like `actor`, but for A_t < 0 the objective is at least c A_t:

    l_t = -max(min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), c A_t)   for A_t < 0, c = ratio_clip_c
    """
    ratio_T, advantages_T = x.log_ratio().exp(), x.advantages
    inner = _clipped(ratio_T, advantages_T, a)
    is_negative_T = advantages_T < 0
    capped_T = torch.where(is_negative_T, torch.minimum(inner.loss, -a.ratio_clip_c * advantages_T), inner.loss)
    return Objective(capped_T, inner.is_low, inner.is_high | (is_negative_T & (ratio_T > a.ratio_clip_c)))


def gspo(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return GSPO (arXiv 2507.18071, eqs. 5 to 7): `actor` with the response's ratio s = exp(mean_t log r_t) for r_t."""
    return _clipped(x.sequence_mean(x.log_ratio()).exp(), x.advantages, a)


def gspo_token(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return GSPO's token form (arXiv 2507.18071, eqs. 13 and 14), for advantages that differ within a response.

    It uses s_t = sg[s] exp(logprobs_t - sg[logprobs_t]) instead of r_t.
    """
    log_sequence_T = x.sequence_mean(x.log_ratio().detach())
    return _clipped((log_sequence_T + x.logprobs - x.logprobs.detach()).exp(), x.advantages, a)


def cispo(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): l_t = -sg[clip(r_t, 1 - low, 1 + high)] A_t logprobs_t.

    No token loses its gradient, because the clip applies to its weight.
    """
    ratio_T = x.log_ratio().exp().detach()
    weight_T = ratio_T.clamp(1 - a.clip_low, 1 + a.clip_high)
    return Objective(-weight_T * x.advantages * x.logprobs, ratio_T < 1 - a.clip_low, ratio_T > 1 + a.clip_high)


def sapo(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return SAPO's soft gate (arXiv 2511.20347): l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t.

    The gradient weight is 1 at r_t = 1. tau is sapo_tau_positive if A_t > 0, else sapo_tau_negative. Nothing is clipped; is_low
    and is_high mark the tokens that `actor` would clip.
    """
    ratio_T = x.log_ratio().exp()
    tau_T = torch.full_like(ratio_T, a.sapo_tau_negative).masked_fill(x.advantages > 0, a.sapo_tau_positive)
    gated_T = 4.0 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1.0))
    clipped = _clipped(ratio_T.detach(), x.advantages, a)
    return Objective(-gated_T * x.advantages, clipped.is_low, clipped.is_high)


def gmpo(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return GMPO (arXiv 2507.20673, eq. 4): the geometric mean of the response's clipped ratios instead of r_t:

        l_t = -exp(mean_u d_u) A_t, d_u = min(log r_u, high) if A_u > 0, else max(log r_u, -low)

    Here low and high bound the logarithm of the ratio (0.4 in the paper).
    """
    log_T = x.log_ratio()
    is_low_T = (x.advantages < 0) & (log_T < -a.clip_low)
    is_high_T = (x.advantages > 0) & (log_T > a.clip_high)
    clipped_T = torch.where(x.advantages > 0, log_T.clamp(max=a.clip_high), log_T.clamp(min=-a.clip_low))
    return Objective(-x.sequence_mean(clipped_T).exp() * x.advantages, is_low_T, is_high_T)


def reinforce(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return REINFORCE (Williams 1992): l_t = -A_t logprobs_t, without ratio or clip. Use one optimizer step per rollout."""
    none_T = torch.zeros_like(x.advantages, dtype=torch.bool)
    return Objective(-x.advantages * x.logprobs, none_T, none_T)


def clip_cov(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return Clip-Cov (arXiv 2505.22617, section 4.2): `actor`, but l_t = 0 on the tokens that covariance.py chooses.

    A chosen token that is already clipped keeps its l_t, which has no gradient.
    """
    inner = _clipped(x.log_ratio().exp(), x.advantages, a)
    assert x.covariance_mask is not None
    is_cut_T = (x.covariance_mask > 0) & ~inner.is_low & ~inner.is_high
    return Objective(inner.loss.masked_fill(is_cut_T, 0.0), inner.is_low, inner.is_high)


def kl_cov(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return KL-Cov (arXiv 2505.22617, section 4.2), without a clip:

    l_t = -r_t A_t, plus cov_kl |log r_t| on the tokens that covariance.py chooses, as in the authors' code
    """
    log_T = x.log_ratio()
    assert x.covariance_mask is not None
    none_T = torch.zeros_like(x.advantages, dtype=torch.bool)
    return Objective(a.cov_kl * x.covariance_mask * log_T.abs() - log_T.exp() * x.advantages, none_T, none_T)


# Keyed by the names in a config (algorithm.loss_type); "actor" is RLinf's name of the clipped objective.
OBJECTIVES: Mapping[str, Callable[[LossInputs, AlgorithmConfig], Objective]] = {
    f.__name__: f for f in (actor, dual_clip, gspo, gspo_token, cispo, sapo, gmpo, reinforce, clip_cov, kl_cov)
}


def _clipped(ratio_T: Tensor, advantages_T: Tensor, a: AlgorithmConfig) -> Objective:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A)."""
    clipped_T = ratio_T.clamp(1 - a.clip_low, 1 + a.clip_high)
    return Objective(
        -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T),
        (ratio_T < 1 - a.clip_low) & (advantages_T < 0),
        (ratio_T > 1 + a.clip_high) & (advantages_T > 0),
    )
