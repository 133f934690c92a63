"""Policy losses: LossInputs -> LossOutputs, pure functions on the [T] vectors of one micro-batch.

`loss` is this micro-batch's part of the global loss, sum_t loss_weights_t * l_t: parts add up over micro-batches and ranks, and
no part is ever divided by a local count. Metrics work alike: `sums` are added and `maxima` maximised over micro-batches
(`accumulate`) and ranks, and only then become numbers (`finalize`). Tokens with loss_mask 0 contribute exactly 0 to all of it
and to the gradient, whatever their values, NaN included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_mega.algorithm.kl import MAX_PENALTY, KLPenalty, k3, kl_penalty

# exp(20) = 5e8: far outside of any clip range, and still finite when multiplied with an advantage of 0.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class LossInputs:
    """The tokens of a micro-batch, each [T] float32 (float64 in tests); old_, ref_ and rollout_logprobs carry no gradient."""

    logprobs: Tensor  # with gradient
    old_logprobs: Tensor
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor  # 1 on response tokens that train
    loss_weights: Tensor  # from aggregate.token_weights
    entropy: Tensor | None = None  # with gradient if there is an entropy bonus


@dataclass(frozen=True)
class LossOutputs:
    """One micro-batch's part of the loss, and of the metrics: detached float64 scalars under the metrics' names."""

    loss: Tensor  # scalar with gradient
    sums: dict[str, Tensor]  # "loss/..." are parts of a weighted sum; "num_tokens" counts; all others are sums over tokens
    maxima: dict[str, Tensor]  # none below 0, which stands for "no token"


LossFunction = Callable[..., LossOutputs]


def grpo_loss(
    inputs: LossInputs,
    *,
    clip_low: float,
    clip_high: float,
    kl_beta: float,
    kl_penalty_type: KLPenalty,
    entropy_bonus: float,
    kl_clamp: float | None = MAX_PENALTY,
) -> LossOutputs:
    """GRPO's clipped objective with a KL penalty, DeepSeekMath (arXiv 2402.03300) eq. 3 (eq. 21 where it is on-policy):

    l_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) + kl_beta KL_t - entropy_bonus H_t

    with r_t = exp(logprobs_t - old_logprobs_t), held within e^+-20. clip_high > clip_low is DAPO's clip-higher
    (arXiv 2503.14476).
    """
    x = _without_masked(inputs)
    ratio_T = _ratio(x)
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    policy_T = -torch.minimum(ratio_T * x.advantages, clipped_T * x.advantages)
    with torch.no_grad():
        is_low_T = (ratio_T < 1 - clip_low) & (x.advantages < 0)
        is_high_T = (ratio_T > 1 + clip_high) & (x.advantages > 0)
    means = {"clip/fraction": is_low_T | is_high_T, "clip/fraction_low": is_low_T, "clip/fraction_high": is_high_T}
    penalty_T = _penalty(x, kl_penalty_type, kl_clamp) if kl_beta != 0.0 else None
    return _outputs(x, policy_T, ratio_T, means, kl_beta, penalty_T, entropy_bonus)


# By the name under which a config asks for it (algorithm.loss_type); "actor" is RLinf's word for the clipped objective.
LOSSES: Mapping[str, LossFunction] = {"actor": grpo_loss}


def accumulate(outputs: Iterable[LossOutputs]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums and maxima of several micro-batches. Names and their order are the same for all of one run's micro-batches."""
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    for output in outputs:
        for name, value in output.sums.items():
            sums[name] = sums[name] + value if name in sums else value
        for name, value in output.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
    return sums, maxima


def finalize(sums: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics from global sums and maxima. Without any token that trains, every metric is 0."""
    num_tokens = float(sums["num_tokens"])
    metrics = {"num_tokens": num_tokens}
    for name, value in sums.items():
        if name.startswith("loss/"):
            metrics[name] = float(value)
        elif name != "num_tokens":
            metrics[name] = float(value) / max(num_tokens, 1.0)
    metrics.update({name: float(value) for name, value in maxima.items()})
    return metrics


def _without_masked(inputs: LossInputs) -> LossInputs:
    """The inputs with 0 on tokens that do not train. Done before any arithmetic, so that no NaN of theirs meets a gradient."""
    is_trained_T = inputs.loss_mask > 0

    def clean(values_T: Tensor) -> Tensor:
        return torch.where(is_trained_T, values_T, 0.0)

    return replace(
        inputs,
        logprobs=clean(inputs.logprobs),
        old_logprobs=clean(inputs.old_logprobs),
        ref_logprobs=None if inputs.ref_logprobs is None else clean(inputs.ref_logprobs),
        rollout_logprobs=clean(inputs.rollout_logprobs),
        advantages=clean(inputs.advantages),
        loss_mask=is_trained_T.to(inputs.loss_mask.dtype),
        loss_weights=clean(inputs.loss_weights),
        entropy=None if inputs.entropy is None else clean(inputs.entropy),
    )


def _ratio(x: LossInputs) -> Tensor:
    """The importance ratio exp(logprobs - old_logprobs) of each token."""
    return (x.logprobs - x.old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _penalty(x: LossInputs, kind: KLPenalty, kl_clamp: float | None) -> Tensor:
    assert x.ref_logprobs is not None, "a KL penalty needs ref_logprobs"
    return kl_penalty(x.logprobs, x.ref_logprobs, kind, old_logprobs=x.old_logprobs, max_penalty=kl_clamp)


def _outputs(
    x: LossInputs,
    policy_T: Tensor,
    ratio_T: Tensor,
    means: dict[str, Tensor],
    kl_beta: float,
    penalty_T: Tensor | None,
    entropy_bonus: float,
) -> LossOutputs:
    """What all losses share: KL and entropy terms, the weighted sum, the metrics. `x` holds no masked values any more."""
    assert x.entropy is not None or entropy_bonus == 0.0, "an entropy bonus needs the entropy"
    terms = {"loss/policy": policy_T}
    if penalty_T is not None:
        terms["loss/kl"] = kl_beta * penalty_T
    if x.entropy is not None and entropy_bonus != 0.0:
        terms["loss/entropy"] = -entropy_bonus * x.entropy
    loss_T = sum(terms.values(), start=torch.zeros_like(policy_T))
    loss = (x.loss_weights * loss_T).sum()
    with torch.no_grad():
        sums = {"num_tokens": _sum(x.loss_mask), "loss/total": _sum(x.loss_weights * loss_T)}
        sums |= {name: _sum(x.loss_weights * term_T) for name, term_T in terms.items()}
        mismatch_T = x.old_logprobs - x.rollout_logprobs
        means = {"ratio/mean": ratio_T, **means}
        if x.ref_logprobs is not None:
            means["kl/mean"] = kl_penalty(x.logprobs, x.ref_logprobs, "low_var_kl")
        if x.entropy is not None:
            means["entropy/mean"] = x.entropy
        means |= {"mismatch/k1": -mismatch_T, "mismatch/k3": k3(mismatch_T), "mismatch/abs_mean": mismatch_T.abs()}
        sums |= {name: _sum(x.loss_mask * values_T) for name, values_T in means.items()}
        maxima = {"ratio/max": _max(x.loss_mask * ratio_T), "mismatch/abs_max": _max(x.loss_mask * mismatch_T.abs())}
    return LossOutputs(loss, sums, maxima)


def _sum(values_T: Tensor) -> Tensor:
    """In float64: float32 cannot count beyond 2^24 tokens."""
    return values_T.detach().sum(dtype=torch.float64)


def _max(values_T: Tensor) -> Tensor:
    return values_T.detach().double().amax()
