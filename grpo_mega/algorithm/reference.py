"""The naive twins of the losses: one response after the other, one token after the other, as the papers print them.

Nothing is shared with the vectorised code, so that both can be compared. A mini-batch is a list of `Response`, ragged and
without padding; tokens are 0-dimensional float64 tensors where a gradient is wanted, and Python floats elsewhere.
`minibatch_loss` is the loss of the whole mini-batch, differentiable. `conformance.json` holds what these functions give.

A token whose mask is 0 is never read. A token that the correction drops is read by the correction alone: a response's mean
ratio (gspo, gmpo) is that of the tokens that are left. The aggregation's denominators count the tokens whose mask is 1,
dropped or not, and all responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A ratio's logarithm is held within this, wherever a ratio is formed.
MAX_LOG_RATIO = 20.0


@dataclass
class Response:
    """What is known of each token of one response: lists of the same length."""

    logprobs: list[Tensor]  # 0-dimensional float64, with gradient
    old_logprobs: list[float]
    rollout_logprobs: list[float]
    advantages: list[float]
    mask: list[int]  # 1: trains
    ref_logprobs: list[float] | None = None
    entropy: list[Tensor] | None = None  # 0-dimensional float64, with gradient


@dataclass(frozen=True)
class Settings:
    """What a loss depends on, by the names of the config's sections `algorithm`, `algorithm.correction` and `rollout`."""

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
    """sum_i sum_t weight_i (importance_t policy_t + kl_beta KL_t - entropy_bonus H_t) over the tokens that are not dropped."""
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
    """For each response the weight of each of its tokens; |o_i| is the number of its tokens whose mask is 1."""
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
    """One token's penalty; `old`, the log-prob before the update, is for low_var_kl_weighted alone."""
    if kind == "kl":
        return logprob - ref
    if kind == "abs":
        return (logprob - ref).abs()
    if kind == "mse":
        return (logprob - ref) * (logprob - ref) / 2
    # DeepSeekMath eq. 4: pi_ref / pi - log(pi_ref / pi) - 1
    log_ratio = held(ref - logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    value = log_ratio.exp() - log_ratio - 1
    if kind == "low_var_kl_weighted":  # DeepSeek-V3.2, arXiv 2512.02556: weighed by pi / pi_old, a constant where k3 is one
        assert old is not None
        ratio = token_ratio(logprob, old)
        value = (ratio if abs(ref - float(logprob.detach())) <= MAX_LOG_RATIO else ratio.detach()) * value
    elif kind != "low_var_kl":
        raise ValueError(kind)
    return value if kl_clamp is None else held(value, -math.inf, kl_clamp)


# Policy terms: {token: l_t} for the tokens in `kept`


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
    """arXiv 2507.18071, eq. 13 and 14: s_i,t = sg[s_i] pi_t / sg[pi_t], so that a token has its own gradient and advantage."""
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
        weight = held(ratio, 1 - settings.ratio_clip_eps_low, 1 + settings.ratio_clip_eps_high).detach()
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
        log_ratio = held(response.logprobs[t] - response.old_logprobs[t], -MAX_LOG_RATIO, MAX_LOG_RATIO)
        if response.advantages[t] > 0:
            logs.append(held(log_ratio, -math.inf, settings.ratio_clip_eps_high))
        else:
            logs.append(held(log_ratio, -settings.ratio_clip_eps_low, math.inf))
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
    """What the policy's term of each token is multiplied by, and the tokens that are left.

    m_t = exp(old_logprobs_t - rollout_logprobs_t). Importance is m_t (token) or the product of all m_t (sequence), at most
    max_importance; or, IcePop (arXiv 2510.18855), m_t within mask_low .. mask_high and 0 out of them. Dropped are tokens with
    m_t out of mask_low .. mask_high, or all of the response if the product of m_t (sequence) or its geometric mean (geometric)
    is out of them, or if any m_t is below veto_below.
    """
    trained = [t for t in range(len(response.mask)) if response.mask[t]]
    if not trained:
        return {}, []
    logs = {}
    for t in trained:
        log_ratio = response.old_logprobs[t] - response.rollout_logprobs[t]
        logs[t] = min(max(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO)
    product = math.exp(min(max(sum(logs.values()), -MAX_LOG_RATIO), MAX_LOG_RATIO))
    geometric = math.exp(sum(logs.values()) / len(logs))

    importance = dict.fromkeys(trained, 1.0)
    for t in trained:
        if settings.importance == "token":
            importance[t] = min(math.exp(logs[t]), settings.max_importance)
        elif settings.importance == "sequence":
            importance[t] = min(product, settings.max_importance)
        elif settings.importance == "icepop":
            ratio = math.exp(logs[t])
            importance[t] = ratio if settings.mask_low <= ratio <= settings.mask_high else 0.0

    kept = []
    for t in trained:
        measured = {"none": None, "token": math.exp(logs[t]), "sequence": product, "geometric": geometric}[settings.mask]
        if measured is None or settings.mask_low <= measured <= settings.mask_high:
            kept.append(t)
    if settings.veto_below is not None and any(math.exp(log) < settings.veto_below for log in logs.values()):
        kept = []
    return importance, kept


# Arithmetic


def token_ratio(logprob: Tensor, old: float) -> Tensor:
    return held(logprob - old, -MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(response: Response, kept: Sequence[int]) -> Tensor:
    logs = [held(response.logprobs[t] - response.old_logprobs[t], -MAX_LOG_RATIO, MAX_LOG_RATIO) for t in kept]
    return torch.stack(logs).mean().exp()


def clipped_objective(ratio: Tensor, advantage: float, settings: Settings) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A)."""
    unclipped = ratio * advantage
    clipped = held(ratio, 1 - settings.ratio_clip_eps_low, 1 + settings.ratio_clip_eps_high) * advantage
    return unclipped if float(unclipped.detach()) <= float(clipped.detach()) else clipped


def held(value: Tensor, low: float, high: float) -> Tensor:
    """The value within low .. high; a constant, without gradient, where it was outside."""
    if float(value.detach()) < low:
        return torch.tensor(low, dtype=torch.float64)
    if float(value.detach()) > high:
        return torch.tensor(high, dtype=torch.float64)
    return value
