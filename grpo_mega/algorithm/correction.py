"""Off-policy correction: the engine sampled with slightly other probabilities than the trainer computes.

m_t = exp(old_logprobs_t - rollout_logprobs_t) is the mismatch ratio of a token, its logarithm clamped to +-20. Weights turn
samples of the engine's distribution into samples of the trainer's, and a mask drops those that are too far off. Neither carries
gradient. Dropped tokens add nothing to the loss, and the counts that divide it stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import MAX_LOG_RATIO, LossInputs
from grpo_mega.config.algorithm import CorrectionConfig


@dataclass(frozen=True)
class Correction:
    importance: Tensor  # [T], the weight c_t of the policy's term
    keep: Tensor  # [T], 0 on dropped tokens, 1 on the others
    metrics: dict[str, Tensor]  # [T] each, to be averaged over tokens; empty without any correction


@torch.no_grad()
def correct(x: LossInputs, c: CorrectionConfig) -> Correction:
    """Return weights and mask for the tokens of a micro-batch without masked values (LossInputs.without_masked).

    c.importance, the weight c_t of the policy's term of a token; KL and entropy keep the weight 1:

    token      min(m_t, max_importance): truncated importance sampling (Ionides 2008; Yao et al., "Your efficient RL framework
               secretly brings you off-policy RL training", 2025)
    sequence   min(prod_t m_t, max_importance) for every token of the response
    icepop     m_t where mask_low <= m_t <= mask_high, else 0: IcePop (Ring-1T report, arXiv 2510.18855)

    c.mask, which tokens are kept; the others lose all their terms, KL and entropy too:

    token      tokens with mask_low <= m_t <= mask_high
    sequence   responses with mask_low <= prod_t m_t <= mask_high
    geometric  responses with mask_low <= exp(mean_t log m_t) <= mask_high

    c.veto_below drops responses that have a token with m_t < veto_below.
    """
    log_T = x.log_mismatch()
    ones_T = torch.ones_like(log_T)
    metrics: dict[str, Tensor] = {}
    importance_T = ones_T
    if c.importance == "icepop":
        ratio_T = log_T.exp()
        is_inside_T = (ratio_T >= c.mask_low) & (ratio_T <= c.mask_high)
        importance_T = ratio_T * is_inside_T
        metrics |= {"importance": importance_T, "masked": ~is_inside_T}
    elif c.importance != "none":
        full_T = _over(x, log_T, c.importance).exp()
        importance_T = full_T.clamp(max=c.max_importance)
        metrics |= {"importance": importance_T, "truncated": full_T > c.max_importance}
    keep_T = ones_T
    if c.mask != "none":
        ratio_T = _over(x, log_T, c.mask).exp()
        is_inside_T = (ratio_T >= c.mask_low) & (ratio_T <= c.mask_high)
        keep_T = keep_T * is_inside_T
        metrics["masked"] = ~is_inside_T
    if c.veto_below is not None:
        is_vetoed_T = x.sequence_sum((log_T.exp() < c.veto_below).to(log_T.dtype)) > 0
        keep_T = keep_T * ~is_vetoed_T
        metrics["vetoed"] = is_vetoed_T
    return Correction(importance_T, keep_T, metrics)


def _over(x: LossInputs, log_T: Tensor, level: str) -> Tensor:
    """Return the log-ratio of each token, or of the product or geometric mean over its response."""
    if level == "token":
        return log_T
    if level == "geometric":
        return x.sequence_mean(log_T)
    assert level == "sequence", level
    return x.sequence_sum(log_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
