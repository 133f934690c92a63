"""Weights of tokens in the loss: from global counts, and off-policy corrections of the engine's probabilities.

The loss of a mini-batch is sum_t weight_t * loss_t over all its sampled tokens, on any rank and in any micro-batch. The
weights come from global counts of sampled tokens, so no layout can change the loss.

Off-policy correction: the engine samples with slightly different probabilities than the trainer computes. m_t =
exp(old_logprobs_t - rollout_logprobs_t) is the mismatch ratio of a token, with its logarithm clamped to +-20. Weights
turn samples of the engine's distribution into samples of the trainer's. A mask drops samples that are too far off.
Neither has a gradient. Dropped tokens add nothing to the loss, and the counts that divide the loss stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import LossInputs, bounded
from grpo_mega.algorithm.kl import k3
from grpo_mega.config import AlgorithmConfig
from grpo_mega.config.algorithm import Aggregation, CorrectionConfig
from grpo_mega.types import Sample


def mini_batch_weights(
    mini_batches: Sequence[Sequence[Sample]], a: AlgorithmConfig, *, max_response_length: int
) -> list[list[float]]:
    """Return, for each sample of each of the step's mini-batches, the weight of each of its sampled tokens.

    Samples that do not contribute to the loss get 0 and do not count. With use_valid_token_scale, token-mean divides by
    the tokens of the whole rollout over the number of mini-batches.
    """
    lengths = [[s.num_sampled if contributes_to_loss(s, a) else 0 for s in samples] for samples in mini_batches]
    num_tokens: list[float] = [sum(response_lens) for response_lens in lengths]
    if a.use_valid_token_scale:
        num_tokens = [sum(num_tokens) / len(mini_batches)] * len(mini_batches)
    return [
        token_weights(
            response_lens,
            a.loss_agg_func,
            max_response_length=max_response_length,
            num_samples=sum(contributes_to_loss(s, a) for s in samples),
            num_tokens=count,
        )
        for samples, response_lens, count in zip(mini_batches, lengths, num_tokens, strict=True)
    ]


def contributes_to_loss(sample: Sample, a: AlgorithmConfig) -> bool:
    """Return False for samples outside the loss.

    These are samples without a reward, unless a teacher teaches them, and with overlong_filter samples that a limit of
    tokens, turns or time ended. Both stay in their group.
    """
    return (sample.is_scored or a.distill_beta > 0) and not (a.overlong_filter and sample.is_truncated)


def positive_weights(mini_batch: Sequence[Sample], a: AlgorithmConfig) -> list[float]:
    """Return, for each sample, the weight of each of its sampled tokens in the negative log-likelihood of right
    answers.

    Right answers are responses in the loss with a reward above positive_above. The weight is 1 / the tokens of all
    right answers (VAPO, arXiv 2504.05118, eq. 9), and 0 for other samples.
    """
    is_right = [contributes_to_loss(s, a) and s.reward is not None and s.reward > a.positive_above for s in mini_batch]
    num_tokens = sum(s.num_sampled for s, it_is in zip(mini_batch, is_right, strict=True) if it_is)
    return [1.0 / num_tokens if it_is and num_tokens else 0.0 for it_is in is_right]


def token_weights(
    response_lens: Sequence[int],
    kind: Aggregation,
    *,
    max_response_length: int,
    num_samples: int,
    num_tokens: float,
) -> list[float]:
    """Return, for each sample, the weight of each of its response tokens. Empty responses get 0.

    num_samples and num_tokens are global counts, of the mini-batch or of any other set that the loss averages over.

        token-mean               1 / num_tokens                           DAPO (arXiv 2503.14476) eq. 8
        seq-mean-token-mean      1 / (num_samples * length)               DeepSeekMath (arXiv 2402.03300) eq. 3
        seq-mean-token-sum       1 / num_samples
        seq-mean-token-sum-norm  1 / (num_samples * max_response_length)  Dr. GRPO (arXiv 2503.20783)
    """
    divisor_of: Mapping[Aggregation, Callable[[int], float]] = {
        "token-mean": lambda length: num_tokens,
        "seq-mean-token-mean": lambda length: num_samples * length,
        "seq-mean-token-sum": lambda length: num_samples,
        "seq-mean-token-sum-norm": lambda length: num_samples * max_response_length,
    }
    return [1.0 / divisor_of[kind](length) if length else 0.0 for length in response_lens]


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
        drift_T = x.sequence_mean(bounded(x.rollout_logprobs - x.logprobs))
        is_off_T = (x.advantages < 0) & (drift_T > c.off_policy_threshold)
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
    return bounded(x.sequence_sum(log_T))
