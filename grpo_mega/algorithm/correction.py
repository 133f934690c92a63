"""Off-policy correction: the engine samples with slightly different probabilities than the trainer computes.

m_t = exp(old_logprobs_t - rollout_logprobs_t) is the mismatch ratio of a token, with its logarithm clamped to +-20.
Weights turn samples of the engine's distribution into samples of the trainer's. A mask drops samples that are too far
off. Neither has a gradient. Dropped tokens add nothing to the loss, and the counts that divide the loss stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import MAX_LOG_RATIO, LossInputs
from grpo_mega.algorithm.kl import k3
from grpo_mega.config.algorithm import CorrectionConfig


@dataclass(frozen=True)
class Correction:
    importance: Tensor  # [T], weight c_t of the policy's term
    keep: Tensor  # [T], 0 on dropped tokens, 1 on the others
    metrics: dict[str, Tensor]  # [T] each, to be averaged over tokens; empty without a correction


@torch.no_grad()
def correct(x: LossInputs, c: CorrectionConfig) -> Correction:
    """Return weights and mask for the tokens of a micro-batch without masked values (LossInputs.without_masked).

    c.importance sets the weight c_t of the policy's term of a token; KL and entropy keep the weight 1:

    token      clip(m_t, min_importance, max_importance): truncated importance sampling (Ionides 2008; Yao et al., "Your
               efficient RL framework secretly brings you off-policy RL training", 2025). Together with the objective's
               ratio to old_logprobs this is decoupled PPO (AReaL, arXiv 2505.24298, eq. 5)
    sequence   clip(prod_t m_t, min_importance, max_importance) for every token of the response
    icepop     m_t if mask_low <= m_t <= mask_high, else 0: IcePop (Ring-1T report, arXiv 2510.18855)

    c.batch_normalize divides these weights by their mean over the mini-batch (x.importance_mean): self-normalised
    importance sampling. c.off_policy_threshold then sets c_t = 0 if A_t < 0 and mean_u (rollout_logprobs_u -
    logprobs_u) of the response exceeds it: off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

    c.mask sets which tokens are kept; the others lose all their terms, KL and entropy too:

    token      tokens with mask_low <= m_t <= mask_high
    sequence   responses with mask_low <= prod_t m_t <= mask_high
    geometric  responses with mask_low <= exp(mean_t log m_t) <= mask_high

    c.reject drops tokens (token_) or responses by rejection sampling, as in verl: if k2 = log^2 m_t / 2 or k3 = m_t - 1
    - log m_t, or their sum, mean or maximum over the response (seq_sum_, seq_mean_, seq_max_), is above reject_above.
    c.veto_below drops responses that have a token with m_t < veto_below.
    """
    log_T = x.log_mismatch()
    keep_T = torch.ones_like(log_T)
    importance_T, metrics = _importance(x, c)
    importance_T = importance_T / x.importance_mean
    if c.off_policy_threshold is not None:
        drift_T = (x.rollout_logprobs - x.logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        is_off_T = (x.advantages < 0) & (x.sequence_mean(drift_T) > c.off_policy_threshold)
        importance_T = importance_T * ~is_off_T
        metrics["off_policy"] = is_off_T
    if c.mask != "none":
        ratio_T = _over(x, log_T, c.mask).exp()
        is_inside_T = (ratio_T >= c.mask_low) & (ratio_T <= c.mask_high)
        keep_T = keep_T * is_inside_T
        metrics["masked"] = ~is_inside_T
    if c.reject != "none":
        assert c.reject_above is not None
        level, _, estimator = c.reject.rpartition("_")
        divergence_T = k3(log_T) if estimator == "k3" else 0.5 * log_T.square()
        over_response = {"seq_sum": x.sequence_sum, "seq_mean": x.sequence_mean, "seq_max": x.sequence_max}
        is_rejected_T = (divergence_T if level == "token" else over_response[level](divergence_T)) > c.reject_above
        keep_T = keep_T * ~is_rejected_T
        metrics["rejected"] = is_rejected_T
    if c.veto_below is not None:
        is_vetoed_T = x.sequence_sum((log_T.exp() < c.veto_below).to(log_T.dtype)) > 0
        keep_T = keep_T * ~is_vetoed_T
        metrics["vetoed"] = is_vetoed_T
    return Correction(importance_T, keep_T, metrics)


@torch.no_grad()
def mean_importance(x: LossInputs, c: CorrectionConfig) -> float:
    """Return the mean weight over a mini-batch's tokens, or over its responses if c.importance is "sequence"; 1 if it
    is 0.
    """
    x = x.without_masked()
    importance_T, _ = _importance(x, c)
    weights_T = x.loss_mask
    if c.importance == "sequence":
        weights_T = weights_T / x.sequence_sum(x.loss_mask).clamp(min=1.0)
    mean = float((weights_T * importance_T).sum() / weights_T.sum().clamp(min=1.0))
    return mean if mean > 1e-8 else 1.0


def _importance(x: LossInputs, c: CorrectionConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weights before c.batch_normalize, and their metrics."""
    log_T = x.log_mismatch()
    if c.importance == "none":
        return torch.ones_like(log_T), {}
    if c.importance == "icepop":
        ratio_T = log_T.exp()
        is_inside_T = (ratio_T >= c.mask_low) & (ratio_T <= c.mask_high)
        return ratio_T * is_inside_T, {"importance": ratio_T * is_inside_T, "masked": ~is_inside_T}
    full_T = _over(x, log_T, c.importance).exp()
    importance_T = full_T.clamp(c.min_importance, c.max_importance)
    return importance_T, {"importance": importance_T, "truncated": full_T != importance_T}


def _over(x: LossInputs, log_T: Tensor, level: str) -> Tensor:
    """Return the log-ratio of each token, or of the product or geometric mean over its response."""
    if level == "token":
        return log_T
    if level == "geometric":
        return x.sequence_mean(log_T)
    assert level == "sequence", level
    return x.sequence_sum(log_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
