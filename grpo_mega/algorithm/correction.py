"""Off-policy correction: the engine sampled with slightly other probabilities than the trainer computes.

m_t = exp(old_logprobs_t - rollout_logprobs_t) is the mismatch ratio of a token, its logarithm within +-20. Samples of the
engine's distribution count for the trainer's by a weight, and those that lie too far off may be dropped. All of it carries no
gradient. Dropped tokens add nothing to the loss, and the counts by which it is divided stay as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import MAX_LOG_RATIO, LossInputs

Importance = Literal["none", "token", "sequence", "icepop"]
Mask = Literal["none", "token", "sequence", "geometric"]


@dataclass(frozen=True)
class CorrectionSettings:
    """importance, c_t of a token:

    token      min(m_t, max_importance): truncated importance sampling (Ionides 2008; Yao et al., "Your efficient RL framework
               secretly brings you off-policy RL training", 2025)
    sequence   min(prod_t m_t, max_importance) for every token of the response
    icepop     m_t where mask_low <= m_t <= mask_high, else 0: IcePop (Ring-1T report, arXiv 2510.18855). Like every c_t it
               leaves KL and entropy alone

    mask, what is kept; the rest loses all its terms, KL and entropy too:

    token      tokens with mask_low <= m_t <= mask_high
    sequence   responses with mask_low <= prod_t m_t <= mask_high
    geometric  responses with mask_low <= exp(mean_t log m_t) <= mask_high

    veto_below drops responses that have a token with m_t < veto_below.
    """

    importance: Importance = "none"
    max_importance: float = 2.0
    mask: Mask = "none"
    mask_low: float = 0.5
    mask_high: float = 5.0
    veto_below: float | None = None


@dataclass(frozen=True)
class Correction:
    importance: Tensor  # [T], the weight c_t of the policy's term
    keep: Tensor  # [T], 0 on tokens that are dropped, 1 on the others
    metrics: dict[str, Tensor]  # [T] each, to be averaged over tokens; none where nothing is corrected


@torch.no_grad()
def correct(x: LossInputs, settings: CorrectionSettings) -> Correction:
    """Weights and mask for the tokens of a micro-batch, from which masked values are gone (LossInputs.without_masked)."""
    log_T = x.log_mismatch()
    ones_T = torch.ones_like(log_T)
    metrics: dict[str, Tensor] = {}
    importance_T = ones_T
    if settings.importance == "icepop":
        ratio_T = log_T.exp()
        is_inside_T = (ratio_T >= settings.mask_low) & (ratio_T <= settings.mask_high)
        importance_T = ratio_T * is_inside_T
        metrics |= {"importance": importance_T, "masked": ~is_inside_T}
    elif settings.importance != "none":
        full_T = _over(x, log_T, settings.importance).exp()
        importance_T = full_T.clamp(max=settings.max_importance)
        metrics |= {"importance": importance_T, "truncated": full_T > settings.max_importance}
    keep_T = ones_T
    if settings.mask != "none":
        ratio_T = _over(x, log_T, settings.mask).exp()
        is_inside_T = (ratio_T >= settings.mask_low) & (ratio_T <= settings.mask_high)
        keep_T = keep_T * is_inside_T
        metrics["masked"] = ~is_inside_T
    if settings.veto_below is not None:
        is_vetoed_T = x.sequence_sum((log_T.exp() < settings.veto_below).to(log_T.dtype)) > 0
        keep_T = keep_T * ~is_vetoed_T
        metrics["vetoed"] = is_vetoed_T
    return Correction(importance_T, keep_T, metrics)


def _over(x: LossInputs, log_T: Tensor, level: Importance | Mask) -> Tensor:
    """The log-ratio of each token, or of its whole response: the product's or the geometric mean's."""
    if level == "token":
        return log_T
    if level == "geometric":
        return x.sequence_mean(log_T)
    assert level == "sequence", level
    return x.sequence_sum(log_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
