"""The policy's term of each loss: what one token adds before weights, KL and entropy; pure functions, one for each method.

In: the inputs of a micro-batch from which masked values are gone (LossInputs.without_masked), and the limits. Out: l_t of each
token, to be minimised, with gradient. r_t = exp(logprobs_t - old_logprobs_t) is the importance ratio, its logarithm within
+-20; sg[] stops the gradient. Where a method speaks of a whole response, every token of it gets the response's value, so that
seq-mean-token-mean gives the mean over responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import LossInputs


@dataclass(frozen=True)
class Limits:
    """How far a ratio may go; see the objective for what each means there."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05


@dataclass(frozen=True)
class Objective:
    loss: Tensor  # [T], l_t
    is_low: Tensor  # [T] bool: no gradient, or less of it, because the ratio is too small
    is_high: Tensor  # [T] bool: ... too large


def actor(x: LossInputs, limits: Limits) -> Objective:
    """GRPO's clipped objective, DeepSeekMath (arXiv 2402.03300) eq. 3 (eq. 21 where it is on-policy):

    l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

    clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476, eq. 8).
    """
    return _clipped(x.log_ratio().exp(), x.advantages, limits)


def dual_clip(x: LossInputs, limits: Limits) -> Objective:
    """PPO's dual clip (arXiv 1912.09729, eq. 5): as `actor`, but where A_t < 0 the objective is at least clip_c A_t:

    l_t = -max(min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), clip_c A_t)   for A_t < 0
    """
    ratio_T, advantages_T = x.log_ratio().exp(), x.advantages
    inner = _clipped(ratio_T, advantages_T, limits)
    is_negative_T = advantages_T < 0
    capped_T = torch.where(is_negative_T, torch.minimum(inner.loss, -limits.clip_c * advantages_T), inner.loss)
    return Objective(capped_T, inner.is_low, inner.is_high | (is_negative_T & (ratio_T > limits.clip_c)))


def gspo(x: LossInputs, limits: Limits) -> Objective:
    """GSPO (arXiv 2507.18071, eqs. 5 to 7): as `actor` with the response's ratio s = exp(mean_t log r_t) in place of r_t."""
    return _clipped(x.sequence_mean(x.log_ratio()).exp(), x.advantages, limits)


def gspo_token(x: LossInputs, limits: Limits) -> Objective:
    """GSPO's token form (arXiv 2507.18071, eqs. 13 and 14), for advantages that differ within a response:

    s_t = sg[s] exp(logprobs_t - sg[logprobs_t]) in place of r_t
    """
    log_sequence_T = x.sequence_mean(x.log_ratio().detach())
    return _clipped((log_sequence_T + x.logprobs - x.logprobs.detach()).exp(), x.advantages, limits)


def cispo(x: LossInputs, limits: Limits) -> Objective:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): l_t = -sg[clip(r_t, 1 - clip_low, 1 + clip_high)] A_t logprobs_t.

    No token loses its gradient; it is the ratio's weight that is clipped.
    """
    ratio_T = x.log_ratio().exp().detach()
    weight_T = ratio_T.clamp(1 - limits.clip_low, 1 + limits.clip_high)
    return Objective(-weight_T * x.advantages * x.logprobs, ratio_T < 1 - limits.clip_low, ratio_T > 1 + limits.clip_high)


def sapo(x: LossInputs, limits: Limits) -> Objective:
    """SAPO's soft gate (arXiv 2511.20347): l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t, with gradient weight 1 at r_t = 1.

    tau is tau_positive where A_t > 0, else tau_negative. Nothing is clipped; is_low and is_high are the tokens that `actor`
    would clip.
    """
    ratio_T = x.log_ratio().exp()
    tau_T = torch.full_like(ratio_T, limits.tau_negative).masked_fill(x.advantages > 0, limits.tau_positive)
    gated_T = 4.0 / tau_T * torch.sigmoid(tau_T * (ratio_T - 1.0))
    clipped = _clipped(ratio_T.detach(), x.advantages, limits)
    return Objective(-gated_T * x.advantages, clipped.is_low, clipped.is_high)


def gmpo(x: LossInputs, limits: Limits) -> Objective:
    """GMPO (arXiv 2507.20673, eq. 4): the geometric mean of the response's clipped ratios in place of r_t:

    l_t = -exp(mean_u d_u) A_t, d_u = min(log r_u, clip_high) where A_u > 0, max(log r_u, -clip_low) elsewhere

    clip_low and clip_high bound the ratio's logarithm here (0.4 in the paper).
    """
    log_T = x.log_ratio()
    is_low_T = (x.advantages < 0) & (log_T < -limits.clip_low)
    is_high_T = (x.advantages > 0) & (log_T > limits.clip_high)
    clipped_T = torch.where(x.advantages > 0, log_T.clamp(max=limits.clip_high), log_T.clamp(min=-limits.clip_low))
    return Objective(-x.sequence_mean(clipped_T).exp() * x.advantages, is_low_T, is_high_T)


def reinforce(x: LossInputs, limits: Limits) -> Objective:
    """REINFORCE (Williams 1992): l_t = -A_t logprobs_t. No ratio, no limit: for one optimizer step a rollout."""
    nothing_T = torch.zeros_like(x.advantages, dtype=torch.bool)
    return Objective(-x.advantages * x.logprobs, nothing_T, nothing_T)


# By the name under which a config asks for it (algorithm.loss_type); "actor" is RLinf's word for the clipped objective.
OBJECTIVES: Mapping[str, Callable[[LossInputs, Limits], Objective]] = {
    f.__name__: f for f in (actor, dual_clip, gspo, gspo_token, cispo, sapo, gmpo, reinforce)
}


def _clipped(ratio_T: Tensor, advantages_T: Tensor, limits: Limits) -> Objective:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""
    clipped_T = ratio_T.clamp(1 - limits.clip_low, 1 + limits.clip_high)
    return Objective(
        -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T),
        (ratio_T < 1 - limits.clip_low) & (advantages_T < 0),
        (ratio_T > 1 + limits.clip_high) & (advantages_T > 0),
    )
