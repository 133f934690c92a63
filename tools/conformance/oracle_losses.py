"""Oracle of the losses: compute them response by response and token by token, as the papers print them.

This module shares no code with the vectorised losses that it checks. A mini-batch is a ragged list of `Response` without
padding; tokens are 0-dimensional float64 tensors where a gradient is needed, and Python floats elsewhere. `minibatch_loss` is
differentiable.

A token with mask 0 is never read. A token that the correction drops is read by the correction alone: the mean ratio of a
response (gspo, gmpo) covers only the remaining tokens. The denominators of the aggregation count every token with mask 1,
dropped or not, and every response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Every log-ratio is clamped to +- this before it is exponentiated.
MAX_LOG_RATIO = 20.0


@dataclass
class Response:
    """One value per token of a response in each list; all lists have the same length."""

    logprobs: list[Tensor]  # 0-dimensional float64, with gradient
    old_logprobs: list[float]
    rollout_logprobs: list[float]
    advantages: list[float]
    mask: list[int]  # 1: the token is included in the loss
    ref_logprobs: list[float] | None = None
    entropy: list[Tensor] | None = None  # 0-dimensional float64, with gradient


@dataclass(frozen=True)
class Settings:
    """Keys of the config's sections `algorithm`, `algorithm.correction` and `rollout` that a loss depends on."""

    loss_type: str = "actor"
    loss_agg_func: str = "seq-mean-token-mean"
    max_response_length: int = 1
    ratio_clip_eps_low: float = 0.2
    ratio_clip_eps_high: float = 0.2
    ratio_clip_c: float = 3.0
    sapo_tau_positive: float = 1.0
    sapo_tau_negative: float = 1.05
    kl_beta: float = 0.0
    kl_penalty_type: str = "low_var_kl"
    kl_clamp: float | None = 10.0
    entropy_bonus: float = 0.0
    importance: str = "none"
    max_importance: float = 2.0
    mask: str = "none"
    mask_low: float = 0.5
    mask_high: float = 5.0
    veto_below: float | None = None


def minibatch_loss(responses: Sequence[Response], settings: Settings) -> Tensor:
    """Return sum_i sum_t weight_i (importance_t policy_t + kl_beta KL_t - entropy_bonus H_t) over the kept tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for response, weight in zip(responses, token_weights(responses, settings), strict=True):
        importance, kept = correct(response, settings)
        policy = POLICY_TERMS[settings.loss_type](response, kept, settings)
        for t in kept:
            token = importance[t] * policy[t]
            if settings.kl_beta > 0:
                assert response.ref_logprobs is not None
                ref, old = response.ref_logprobs[t], response.old_logprobs[t]
                kl = kl_penalty(response.logprobs[t], ref, settings.kl_penalty_type, old=old, kl_clamp=settings.kl_clamp)
                token = token + settings.kl_beta * kl
            if settings.entropy_bonus != 0:
                assert response.entropy is not None
                token = token - settings.entropy_bonus * response.entropy[t]
            total = total + weight * token
    return total


def token_weights(responses: Sequence[Response], settings: Settings) -> list[float]:
    """Return, for each response, the weight of each of its tokens; its length is the number of its tokens with mask 1."""
    lengths = [sum(response.mask) for response in responses]
    weights = []
    for length in lengths:
        if length == 0:
            weights.append(0.0)
        elif settings.loss_agg_func == "token-mean":  # DAPO, arXiv 2503.14476, eq. 8
            weights.append(1 / sum(lengths))
        elif settings.loss_agg_func == "seq-mean-token-mean":  # DeepSeekMath, arXiv 2402.03300, eq. 3
            weights.append(1 / len(lengths) / length)
        elif settings.loss_agg_func == "seq-mean-token-sum":
            weights.append(1 / len(lengths))
        elif settings.loss_agg_func == "seq-mean-token-sum-norm":  # Dr. GRPO, arXiv 2503.20783, with a constant length
            weights.append(1 / len(lengths) / settings.max_response_length)
        else:
            raise ValueError(settings.loss_agg_func)
    return weights


# KL


def kl_penalty(logprob: Tensor, ref: float, kind: str, *, old: float | None = None, kl_clamp: float | None = 10.0) -> Tensor:
    """Return the penalty of one token; only low_var_kl_weighted needs `old`, the log-prob before the update."""
    if kind == "kl":
        return logprob - ref
    if kind == "abs":
        return (logprob - ref).abs()
    if kind == "mse":
        return (logprob - ref) * (logprob - ref) / 2
    # DeepSeekMath eq. 4: pi_ref / pi - log(pi_ref / pi) - 1
    log_ratio = clamp(ref - logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    value = log_ratio.exp() - log_ratio - 1
    if (
        kind == "low_var_kl_weighted"
    ):  # DeepSeek-V3.2, arXiv 2512.02556: times pi / pi_old, which has no gradient where k3 is clamped
        assert old is not None
        ratio = token_ratio(logprob, old)
        value = (ratio if abs(ref - float(logprob.detach())) <= MAX_LOG_RATIO else ratio.detach()) * value
    elif kind != "low_var_kl":
        raise ValueError(kind)
    return value if kl_clamp is None else clamp(value, -math.inf, kl_clamp)


# Policy terms: each function returns {token: l_t} for the tokens in `kept`.


def actor(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """DeepSeekMath, arXiv 2402.03300, eq. 3."""
    terms = {}
    for t in kept:
        ratio = token_ratio(response.logprobs[t], response.old_logprobs[t])
        terms[t] = -clipped_objective(ratio, response.advantages[t], settings)
    return terms


def dual_clip(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 1912.09729, eq. 5: where A < 0, max(min(r A, clip(r) A), c A)."""
    terms = {}
    for t in kept:
        advantage = response.advantages[t]
        objective = clipped_objective(token_ratio(response.logprobs[t], response.old_logprobs[t]), advantage, settings)
        floor = settings.ratio_clip_c * advantage
        if advantage < 0 and float(objective.detach()) < floor:
            objective = torch.tensor(floor, dtype=torch.float64)
        terms[t] = -objective
    return terms


def gspo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2507.18071, eq. 5 and 7: s_i = exp(mean_t log r_t), clipped as a whole."""
    if not kept:
        return {}
    ratio = sequence_ratio(response, kept)
    return {t: -clipped_objective(ratio, response.advantages[t], settings) for t in kept}


def gspo_token(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2507.18071, eq. 13 and 14: s_i,t = sg[s_i] pi_t / sg[pi_t], so each token has its own gradient and advantage."""
    if not kept:
        return {}
    ratio = sequence_ratio(response, kept).detach()
    terms = {}
    for t in kept:
        one = (response.logprobs[t] - response.logprobs[t].detach()).exp()
        terms[t] = -clipped_objective(ratio * one, response.advantages[t], settings)
    return terms


def cispo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2506.13585, eq. 4 and 5: -sg[clip(r)] A log pi."""
    terms = {}
    for t in kept:
        ratio = token_ratio(response.logprobs[t], response.old_logprobs[t])
        weight = clamp(ratio, 1 - settings.ratio_clip_eps_low, 1 + settings.ratio_clip_eps_high).detach()
        terms[t] = -weight * response.advantages[t] * response.logprobs[t]
    return terms


def sapo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2511.20347: -f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)), tau by the sign of A."""
    terms = {}
    for t in kept:
        ratio = token_ratio(response.logprobs[t], response.old_logprobs[t])
        tau = settings.sapo_tau_positive if response.advantages[t] > 0 else settings.sapo_tau_negative
        terms[t] = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * response.advantages[t]
    return terms


def gmpo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2507.20673, eq. 4: -A (prod_t r_t)^(1/n), log r_t at most high where A > 0, at least -low elsewhere."""
    if not kept:
        return {}
    logs = []
    for t in kept:
        log_ratio = clamp(response.logprobs[t] - response.old_logprobs[t], -MAX_LOG_RATIO, MAX_LOG_RATIO)
        if response.advantages[t] > 0:
            logs.append(clamp(log_ratio, -math.inf, settings.ratio_clip_eps_high))
        else:
            logs.append(clamp(log_ratio, -settings.ratio_clip_eps_low, math.inf))
    mean = torch.stack(logs).mean().exp()
    return {t: -response.advantages[t] * mean for t in kept}


def reinforce(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """Williams (1992): -A log pi."""
    return {t: -response.advantages[t] * response.logprobs[t] for t in kept}


POLICY_TERMS: Mapping[str, Callable[[Response, Sequence[int], Settings], dict[int, Tensor]]] = {
    "actor": actor,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "reinforce": reinforce,
}


# Correction of the mismatch between engine and trainer


def correct(response: Response, settings: Settings) -> tuple[dict[int, float], list[int]]:
    """Return the factor of the policy's term of each token, and the tokens that are kept.

    m_t = exp(old_logprobs_t - rollout_logprobs_t). Importance is m_t (token) or the product of all m_t (sequence), at most
    max_importance; or, with IcePop (arXiv 2510.18855), m_t within mask_low .. mask_high and 0 outside. The mask drops tokens
    with m_t outside mask_low .. mask_high, or a whole response if the product of its m_t (sequence) or their geometric mean
    (geometric) is outside. veto_below drops a response if any of its m_t is smaller.
    """
    unmasked = [t for t in range(len(response.mask)) if response.mask[t]]
    if not unmasked:
        return {}, []
    logs = {}
    for t in unmasked:
        log_ratio = response.old_logprobs[t] - response.rollout_logprobs[t]
        logs[t] = min(max(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO)
    product = math.exp(min(max(sum(logs.values()), -MAX_LOG_RATIO), MAX_LOG_RATIO))
    geometric = math.exp(sum(logs.values()) / len(logs))

    importance = dict.fromkeys(unmasked, 1.0)
    for t in unmasked:
        if settings.importance == "token":
            importance[t] = min(math.exp(logs[t]), settings.max_importance)
        elif settings.importance == "sequence":
            importance[t] = min(product, settings.max_importance)
        elif settings.importance == "icepop":
            ratio = math.exp(logs[t])
            importance[t] = ratio if settings.mask_low <= ratio <= settings.mask_high else 0.0

    kept = []
    for t in unmasked:
        measured = {"none": None, "token": math.exp(logs[t]), "sequence": product, "geometric": geometric}[settings.mask]
        if measured is None or settings.mask_low <= measured <= settings.mask_high:
            kept.append(t)
    if settings.veto_below is not None and any(math.exp(log) < settings.veto_below for log in logs.values()):
        kept = []
    return importance, kept


# Arithmetic


def token_ratio(logprob: Tensor, old: float) -> Tensor:
    return clamp(logprob - old, -MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(response: Response, kept: Sequence[int]) -> Tensor:
    logs = [clamp(response.logprobs[t] - response.old_logprobs[t], -MAX_LOG_RATIO, MAX_LOG_RATIO) for t in kept]
    return torch.stack(logs).mean().exp()


def clipped_objective(ratio: Tensor, advantage: float, settings: Settings) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A)."""
    unclipped = ratio * advantage
    clipped = clamp(ratio, 1 - settings.ratio_clip_eps_low, 1 + settings.ratio_clip_eps_high) * advantage
    return unclipped if float(unclipped.detach()) <= float(clipped.detach()) else clipped


def clamp(value: Tensor, low: float, high: float) -> Tensor:
    """Clamp the value to low .. high; a clamped value is a constant without gradient."""
    if float(value.detach()) < low:
        return torch.tensor(low, dtype=torch.float64)
    if float(value.detach()) > high:
        return torch.tensor(high, dtype=torch.float64)
    return value
