"""Policy losses: LossInputs -> LossOutputs, pure functions on the [T] vectors of one micro-batch.

`loss` is the micro-batch's part of the mini-batch's loss, sum_t loss_weights_t * l_t. Parts add up over micro-batches
and ranks, and no part is ever divided by a local count. Metrics work the same way: over micro-batches (`accumulate`)
and ranks, `sums` are added and the largest of `maxima` is taken. `finalize` turns them into numbers. Tokens with
loss_mask 0 contribute exactly 0 to all of these and to the gradient, even if their values are NaN.

An objective returns l_t of each token, the policy's term before weights, KL and entropy, to be minimised, with
gradient. Its inputs are without masked values (LossInputs.without_masked). r_t = exp(logprobs_t - old_logprobs_t) is
the importance ratio, with its logarithm clamped to +-20; low and high are a.clip_low and a.clip_high; sg[] stops the
gradient. If a method defines one value per response, every token of the response gets it, so seq-mean-token-mean
returns the mean over responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.kl import k3, kl_penalty
from grpo_mega.algorithm.token_weights import correct
from grpo_mega.config import AlgorithmConfig


@dataclass(frozen=True)
class LossOutputs:
    """One micro-batch's part of the loss and of the metrics (detached float64 scalars by name)."""

    loss: Tensor  # scalar with gradient
    # "loss/..." are parts of a weighted sum; "num_tokens" counts; all others are sums over tokens.
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]  # at least 0, the value without tokens


def policy_loss(inputs: LossInputs, a: AlgorithmConfig) -> LossOutputs:
    """Return one micro-batch's part of sum_t loss_weights_t keep_t (c_t l_t + kl_beta KL_t - entropy_bonus H_t).

    l_t is the objective's loss of a token. c_t and keep_t are the off-policy correction's weight and mask
    (token_weights.py), both 1 without one. a.positive_nll adds positive_nll sum_t nll_weights_t keep_t (-logprobs_t),
    VAPO's imitation of right answers (arXiv 2504.05118, eqs. 9 and 10). A KL penalty in the reward (a.kl_in) adds
    nothing to the loss.

    a.distill_beta adds -distill_beta (old_logprobs - teacher_logprobs) to the advantages. On-policy, the gradient of
    the sum is the gradient of KL(policy || teacher), one token at a time (MiniLLM's single-step part, arXiv 2306.08543,
    section 2.2). Advantages of rewards are normalised before that, so the teacher's scale is distill_beta alone. With
    a.distill_kl reverse or forward it adds distill_beta keep_t teacher_kl_t to the loss instead (GKD, arXiv 2306.13649,
    eq. 4).
    """
    x = inputs.without_masked()
    if a.distill_beta > 0 and not a.has_vocab_kl:
        x = replace(x, advantages=x.advantages - a.distill_beta * x.log_policy_over_teacher())
    correction = correct(x, a.correction)
    # A dropped token is excluded from its response's mean ratio too, because it would get a gradient through it.
    objective = OBJECTIVES[a.loss_type](replace(x, loss_mask=x.loss_mask * correction.keep), a)
    weights_T = x.loss_weights * correction.keep
    terms = {"loss/policy": weights_T * correction.importance * objective.loss}
    if a.has_kl_loss:
        assert x.ref_logprobs is not None, "a KL penalty needs ref_logprobs"
        penalty_T = kl_penalty(
            x.logprobs, x.ref_logprobs, a.kl_penalty_type, old_logprobs=x.old_logprobs, kl_clamp=a.kl_clamp
        )
        terms["loss/kl"] = a.kl_beta * weights_T * penalty_T
    if a.has_vocab_kl:
        assert x.teacher_kl is not None, "distillation over the vocabulary needs teacher_kl"
        terms["loss/distill"] = a.distill_beta * weights_T * x.teacher_kl
    if a.entropy_bonus != 0.0:
        assert x.entropy is not None, "an entropy bonus needs the entropy"
        terms["loss/entropy"] = -a.entropy_bonus * weights_T * x.entropy
    if a.positive_nll > 0:
        assert x.nll_weights is not None, "a likelihood of right answers needs nll_weights"
        terms["loss/nll"] = -a.positive_nll * x.nll_weights * correction.keep * x.logprobs
    loss_T = sum(terms.values(), start=torch.zeros_like(objective.loss))
    with torch.no_grad():
        sums = {"num_tokens": _sum(x.loss_mask), "loss/total": _sum(loss_T)}
        sums |= {name: _sum(term_T) for name, term_T in terms.items()}
        diagnostics, maxima = _diagnostics(x, objective, a.kl_clamp)
        sums |= diagnostics | {
            f"correction/{name}": _sum(x.loss_mask * values_T) for name, values_T in correction.metrics.items()
        }
        if a.is_by_covariance and x.covariance_mask is not None:
            sums["clip/chosen"] = _sum(x.covariance_mask)
    return LossOutputs(loss=loss_T.sum(), sums=sums, maxima=maxima)


def accumulate(outputs: Iterable[LossOutputs]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Combine the sums and maxima of micro-batches. They have the same names in the same order throughout a run."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for output in outputs:
        for name, value in output.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in output.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    return sums, maxima


def finalize(sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics from global sums and maxima; all are 0 without unmasked tokens."""
    num_tokens = max(float(sums["num_tokens"]), 1.0)
    metrics = {name: float(value) for name, value in (*sums.items(), *maxima.items())}
    for name in sums:
        if name != "num_tokens" and not name.startswith("loss/"):
            metrics[name] /= num_tokens
    return metrics


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
    """Return GSPO (arXiv 2507.18071, eqs. 5 to 7): `actor` with the response's ratio s = exp(mean_t log r_t) for
    r_t.
    """
    return _clipped(x.sequence_mean(x.log_ratio()).exp(), x.advantages, a)


def gspo_token(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return GSPO's token form (arXiv 2507.18071, eqs. 13 and 14), for advantages that differ within a response.

    It uses s_t = sg[s] exp(logprobs_t - sg[logprobs_t]) instead of r_t.
    """
    log_sequence_T = x.sequence_mean(x.log_ratio().detach())
    return _clipped((log_sequence_T + x.logprobs - x.logprobs.detach()).exp(), x.advantages, a)


def cispo(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return CISPO (MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5): l_t = -sg[clip(r_t, 1 - low, 1 + high)] A_t
    logprobs_t.

    No token loses its gradient, because the clip applies to its weight.
    """
    ratio_T = x.log_ratio().exp().detach()
    weight_T = ratio_T.clamp(1 - a.clip_low, 1 + a.clip_high)
    return Objective(-weight_T * x.advantages * x.logprobs, ratio_T < 1 - a.clip_low, ratio_T > 1 + a.clip_high)


def sapo(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return SAPO's soft gate (arXiv 2511.20347): l_t = -(4 / tau) sigmoid(tau (r_t - 1)) A_t.

    The gradient weight is 1 at r_t = 1. tau is sapo_tau_positive if A_t > 0, else sapo_tau_negative. Nothing is
    clipped; is_low and is_high mark the tokens that `actor` would clip.
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
    """Return REINFORCE (Williams 1992): l_t = -A_t logprobs_t, without ratio or clip. Use one optimizer step per
    rollout.
    """
    none_T = torch.zeros_like(x.advantages, dtype=torch.bool)
    return Objective(-x.advantages * x.logprobs, none_T, none_T)


def clip_cov(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return Clip-Cov (arXiv 2505.22617, section 4.2): `actor`, but l_t = 0 on the tokens of `choose_by_covariance`.

    A chosen token that is already clipped keeps its l_t, which has no gradient.
    """
    inner = _clipped(x.log_ratio().exp(), x.advantages, a)
    assert x.covariance_mask is not None
    is_cut_T = (x.covariance_mask > 0) & ~inner.is_low & ~inner.is_high
    return Objective(inner.loss.masked_fill(is_cut_T, 0.0), inner.is_low, inner.is_high)


def kl_cov(x: LossInputs, a: AlgorithmConfig) -> Objective:
    """Return KL-Cov (arXiv 2505.22617, section 4.2), without a clip:

    l_t = -r_t A_t, plus cov_kl |log r_t| on the tokens of `choose_by_covariance`, as in the authors' code
    """
    log_T = x.log_ratio()
    assert x.covariance_mask is not None
    none_T = torch.zeros_like(x.advantages, dtype=torch.bool)
    return Objective(a.cov_kl * x.covariance_mask * log_T.abs() - log_T.exp() * x.advantages, none_T, none_T)


# Keyed by the names in a config (algorithm.loss_type); "actor" is RLinf's name of the clipped objective.
OBJECTIVES: Mapping[str, Callable[[LossInputs, AlgorithmConfig], Objective]] = {
    f.__name__: f for f in (actor, dual_clip, gspo, gspo_token, cispo, sapo, gmpo, reinforce, clip_cov, kl_cov)
}


@torch.no_grad()
def choose_by_covariance(x: LossInputs, a: AlgorithmConfig, generator: torch.Generator) -> Tensor:
    """Return [T]: 1 on the tokens that clip_cov and kl_cov treat differently (arXiv 2505.22617, section 4.2), else 0.

    These tokens reduce the entropy most. `x` is a whole mini-batch before its update, so neither micro-batches nor
    ranks change the choice. With cov_t = (old_logprobs_t - their mean) (A_t - its mean), and means over the mini-batch:

        clip_cov  chooses at random among the tokens with cov_low < cov_t < cov_high
        kl_cov    chooses the tokens with the largest cov_t

    The number of chosen tokens is a share cov_share of all tokens, rounded down but at least one; clip_cov may find
    fewer.
    """
    is_chosen_T = torch.zeros_like(x.old_logprobs)
    where_N = torch.nonzero(x.loss_mask > 0)[:, 0]
    if not len(where_N):
        return is_chosen_T
    logprobs_N, advantages_N = x.old_logprobs[where_N].double(), x.advantages[where_N].double()
    cov_N = (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())
    if a.loss_type == "clip_cov":
        candidates = torch.nonzero((cov_N > a.cov_low) & (cov_N < a.cov_high))[:, 0]
        ranked = candidates[torch.randperm(len(candidates), generator=generator)]
    else:
        ranked = cov_N.argsort(descending=True, stable=True)
    is_chosen_T[where_N[ranked[: max(1, int(a.cov_share * len(where_N)))]]] = 1.0
    return is_chosen_T


def _diagnostics(
    x: LossInputs, objective: Objective, kl_clamp: float | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the sums and maxima that every loss reports. `x` must be without masked values."""
    ratio_T = x.log_ratio().exp()
    mismatch_T = x.old_logprobs - x.rollout_logprobs
    means = {
        "ratio/mean": ratio_T,
        "clip/fraction": objective.is_low | objective.is_high,
        "clip/fraction_low": objective.is_low,
        "clip/fraction_high": objective.is_high,
    }
    if x.ref_logprobs is not None:
        means["kl/mean"] = kl_penalty(x.logprobs, x.ref_logprobs, "low_var_kl", kl_clamp=kl_clamp)
    if x.teacher_logprobs is not None:
        means["distill/kl"] = x.log_policy_over_teacher()
    if x.teacher_kl is not None:
        means["distill/kl"] = x.teacher_kl
    if x.entropy is not None:
        means["entropy/mean"] = x.entropy
    means |= {"mismatch/k1": -mismatch_T, "mismatch/k3": k3(mismatch_T), "mismatch/abs_mean": mismatch_T.abs()}
    sums = {name: _sum(x.loss_mask * values_T) for name, values_T in means.items()}
    maxima = {"ratio/max": _max(x.loss_mask * ratio_T), "mismatch/abs_max": _max(x.loss_mask * mismatch_T.abs())}
    return sums, maxima


def _sum(values_T: Tensor) -> Tensor:
    """Sum in float64: float32 cannot count beyond 2^24 tokens."""
    return values_T.detach().sum(dtype=torch.float64)


def _max(values_T: Tensor) -> Tensor:
    return values_T.detach().double().amax()


def _clipped(ratio_T: Tensor, advantages_T: Tensor, a: AlgorithmConfig) -> Objective:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A)."""
    clipped_T = ratio_T.clamp(1 - a.clip_low, 1 + a.clip_high)
    return Objective(
        -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T),
        (ratio_T < 1 - a.clip_low) & (advantages_T < 0),
        (ratio_T > 1 + a.clip_high) & (advantages_T > 0),
    )
