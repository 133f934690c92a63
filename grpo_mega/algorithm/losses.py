"""Policy losses: LossInputs -> LossOutputs, pure functions on the [T] vectors of one micro-batch.

`loss` is the micro-batch's part of the mini-batch's loss, sum_t loss_weights_t * l_t. Parts add up over micro-batches and
ranks, and no part is ever divided by a local count. Metrics work the same way: over micro-batches (`accumulate`) and ranks,
`sums` are added and the largest of `maxima` is taken. `finalize` turns them into numbers. Tokens with loss_mask 0 contribute
exactly 0 to all of these and to the gradient, even if their values are NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_mega.algorithm.correction import correct
from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.kl import k3, kl_penalty
from grpo_mega.algorithm.objectives import OBJECTIVES, Objective
from grpo_mega.config import AlgorithmConfig


@dataclass(frozen=True)
class LossOutputs:
    """One micro-batch's part of the loss and of the metrics (detached float64 scalars by name)."""

    loss: Tensor  # scalar with gradient
    sums: dict[str, Tensor]  # "loss/..." are parts of a weighted sum; "num_tokens" counts; all others are sums over tokens
    maxima: dict[str, Tensor]  # at least 0, the value without tokens


def policy_loss(inputs: LossInputs, a: AlgorithmConfig) -> LossOutputs:
    """Return one micro-batch's part of sum_t loss_weights_t keep_t (c_t l_t + kl_beta KL_t - entropy_bonus H_t).

    l_t is the objective's loss of a token (objectives.py). c_t and keep_t are the off-policy correction's weight and mask
    (correction.py), both 1 without one. a.positive_nll adds positive_nll sum_t nll_weights_t keep_t (-logprobs_t), VAPO's
    imitation of right answers (arXiv 2504.05118, eqs. 9 and 10). A KL penalty in the reward (a.kl_in) adds nothing to the loss.

    a.distill_beta adds -distill_beta (old_logprobs - teacher_logprobs) to the advantages. On-policy, the gradient of the sum is
    the gradient of KL(policy || teacher), one token at a time (MiniLLM's single-step part, arXiv 2306.08543, section 2.2).
    Advantages of rewards are normalised before that, so the teacher's scale is distill_beta alone. With a.distill_kl reverse or
    forward it adds distill_beta keep_t teacher_kl_t to the loss instead (GKD, arXiv 2306.13649, eq. 4).
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
        penalty_T = kl_penalty(x.logprobs, x.ref_logprobs, a.kl_penalty_type, old_logprobs=x.old_logprobs, kl_clamp=a.kl_clamp)
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
    num_tokens = float(sums["num_tokens"])
    metrics = {"num_tokens": num_tokens}
    for name, value in sums.items():
        if name.startswith("loss/"):
            metrics[name] = float(value)
        elif name != "num_tokens":
            metrics[name] = float(value) / max(num_tokens, 1.0)
    metrics.update({name: float(value) for name, value in maxima.items()})
    return metrics


def _diagnostics(x: LossInputs, objective: Objective, kl_clamp: float | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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
