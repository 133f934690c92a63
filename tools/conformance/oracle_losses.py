"""Oracle of the losses: compute them response by response and token by token, as written in the papers.

This module shares no code with the vectorized losses that it checks. A mini-batch is a ragged list of `Response`
without padding. Tokens that need a gradient are 0-dimensional float64 tensors; other numbers are Python floats.

A token with mask 0 is never read. Only the correction reads a token that it drops: the mean ratio of a response (gspo,
gmpo) covers the remaining tokens. Aggregations divide by all tokens with mask 1, or by all responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Every log-ratio is clamped to -MAX_LOG_RATIO .. MAX_LOG_RATIO before it is exponentiated.
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
    reward: float | None = None  # reward of the whole response; only positive_nll needs it
    teacher_logprobs: list[float] | None = None  # log-probs under the model to distill from
    teacher_kl: list[Tensor] | None = None  # KL over the vocabulary


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
    cov_share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl: float = 1.0
    distill_beta: float = 0.0
    distill_kl: str = "sampled"
    positive_nll: float = 0.0
    positive_above: float = 0.0
    importance: str = "none"
    min_importance: float = 0.0
    max_importance: float = 2.0
    batch_normalize: bool = False
    mask: str = "none"
    mask_low: float = 0.5
    mask_high: float = 5.0
    reject: str = "none"
    reject_above: float | None = None
    veto_below: float | None = None
    off_policy_threshold: float | None = None


def minibatch_loss(responses: Sequence[Response], settings: Settings) -> Tensor:
    """Return sum_i sum_t weight_i (importance_t policy_t + kl_beta KL_t - entropy_bonus H_t) over the kept tokens, plus
    positive_nll times the mean of -log pi over all tokens of right answers (VAPO, arXiv 2504.05118, eqs. 9 and 10)."""
    total = torch.zeros((), dtype=torch.float64)
    is_taught = settings.distill_beta > 0 and settings.distill_kl == "sampled"
    responses = [taught(response, settings) if is_taught else response for response in responses]
    scale = 1 / mean_importance(responses, settings) if settings.batch_normalize else 1.0
    chosen = chosen_tokens(responses, settings) if settings.loss_type in ("clip_cov", "kl_cov") else set()
    right = [r.reward is not None and r.reward > settings.positive_above for r in responses]
    num_right = sum(sum(response.mask) for response, is_right in zip(responses, right, strict=True) if is_right)
    for i, (response, weight) in enumerate(zip(responses, token_weights(responses, settings), strict=True)):
        importance, kept = correct(response, settings)
        if settings.loss_type in ("clip_cov", "kl_cov"):
            policy = by_covariance(response, kept, settings, {t for j, t in chosen if j == i})
        else:
            policy = POLICY_TERMS[settings.loss_type](response, kept, settings)
        off_policy = off_policy_tokens(response, settings)
        for t in kept:
            token = (0.0 if t in off_policy else importance[t] * scale) * policy[t]
            if settings.positive_nll > 0 and right[i]:
                total = total - settings.positive_nll * response.logprobs[t] / num_right
            if settings.kl_beta > 0:
                assert response.ref_logprobs is not None
                ref, old = response.ref_logprobs[t], response.old_logprobs[t]
                kl = kl_penalty(
                    response.logprobs[t], ref, settings.kl_penalty_type, old=old, kl_clamp=settings.kl_clamp
                )
                token = token + settings.kl_beta * kl
            if response.teacher_kl and settings.distill_kl != "sampled":
                token = token + settings.distill_beta * response.teacher_kl[t]
            if settings.entropy_bonus != 0:
                assert response.entropy is not None
                token = token - settings.entropy_bonus * response.entropy[t]
            total = total + weight * token
    return total


def taught(response: Response, settings: Settings) -> Response:
    """Add -distill_beta (log p_old - log p_teacher) to each token's advantage."""
    leads = [old - its for old, its in zip(response.old_logprobs, response.teacher_logprobs or [], strict=True)]
    parts = [settings.distill_beta * min(max(lead, -MAX_LOG_RATIO), MAX_LOG_RATIO) for lead in leads]
    return replace(response, advantages=[a - part for a, part in zip(response.advantages, parts, strict=True)])


def token_weights(responses: Sequence[Response], settings: Settings) -> list[float]:
    """Return the token weight of each response. The length of a response is its number of tokens with mask 1."""
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


def kl_penalty(
    logprob: Tensor, ref: float, kind: str, *, old: float | None = None, kl_clamp: float | None = 10.0
) -> Tensor:
    """Return the penalty of one token. Only low_var_kl_weighted needs `old`, the log-prob before the update."""
    if kind == "kl":
        return logprob - ref
    if kind == "abs":
        return (logprob - ref).abs()
    if kind == "mse":
        return (logprob - ref) * (logprob - ref) / 2
    # DeepSeekMath eq. 4: pi_ref / pi - log(pi_ref / pi) - 1
    log_ratio = clamp(ref - logprob, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    value = log_ratio.exp() - log_ratio - 1
    if kind == "low_var_kl+":  # a straight line through k3's value with the slope of k2
        height = float(value.detach()) if kl_clamp is None else min(float(value.detach()), kl_clamp)
        slope = float(logprob.detach()) - ref
        return height + slope * (logprob - logprob.detach())
    if (
        kind == "low_var_kl_weighted"
    ):  # DeepSeek-V3.2, arXiv 2512.02556: times pi / pi_old, which has no gradient where k3 is clamped
        assert old is not None
        ratio = token_ratio(logprob, old)
        value = (ratio if abs(ref - float(logprob.detach())) <= MAX_LOG_RATIO else ratio.detach()) * value
    elif kind != "low_var_kl":
        raise ValueError(kind)
    return value if kl_clamp is None else clamp(value, -math.inf, kl_clamp)


# Policy terms. Each function returns {token: l_t} for the tokens in `kept`.


def actor(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """Return the terms of DeepSeekMath, arXiv 2402.03300, eq. 3."""
    terms = {}
    for t in kept:
        ratio = token_ratio(response.logprobs[t], response.old_logprobs[t])
        terms[t] = -clipped_objective(ratio, response.advantages[t], settings)
    return terms


def dual_clip(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 1912.09729, eq. 5: max(min(r A, clip(r) A), c A) if A < 0."""
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
    """arXiv 2507.18071, eq. 13 and 14: s_i,t = sg[s_i] pi_t / sg[pi_t], so each token has its own gradient and
    advantage.
    """
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
    """arXiv 2511.20347: -f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)). tau depends on the sign of A."""
    terms = {}
    for t in kept:
        ratio = token_ratio(response.logprobs[t], response.old_logprobs[t])
        tau = settings.sapo_tau_positive if response.advantages[t] > 0 else settings.sapo_tau_negative
        terms[t] = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * response.advantages[t]
    return terms


def gmpo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2507.20673, eq. 4: -A (prod_t r_t)^(1/n). log r_t is at most high if A > 0, otherwise at least -low."""
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


def by_covariance(response: Response, kept: Sequence[int], settings: Settings, chosen: set[int]) -> dict[int, Tensor]:
    """arXiv 2505.22617, 4.2: clip_cov removes the chosen tokens unless they are clipped; kl_cov adds |log r| to
    them.
    """
    terms = {}
    for t in kept:
        ratio, advantage = token_ratio(response.logprobs[t], response.old_logprobs[t]), response.advantages[t]
        if settings.loss_type == "kl_cov":
            terms[t] = -ratio * advantage
            if t in chosen:
                gap = clamp(response.logprobs[t] - response.old_logprobs[t], -MAX_LOG_RATIO, MAX_LOG_RATIO)
                terms[t] = terms[t] + settings.cov_kl * gap.abs()
            continue
        number = float(ratio.detach())
        is_high = advantage > 0 and number > 1 + settings.ratio_clip_eps_high
        is_low = advantage < 0 and number < 1 - settings.ratio_clip_eps_low
        terms[t] = -clipped_objective(ratio, advantage, settings)
        if t in chosen and not is_high and not is_low:
            terms[t] = torch.zeros((), dtype=torch.float64)
    return terms


def chosen_tokens(responses: Sequence[Response], settings: Settings) -> set[tuple[int, int]]:
    """Return (response, token) for the tokens that clip_cov or kl_cov chooses by the covariance of log-prob and
    advantage.

    Means and share are over the mini-batch; log-probs are from before its update. If there are more candidates than the
    share, clip_cov selects at random. No case here has so many candidates.
    """
    tokens = [(i, t) for i, response in enumerate(responses) for t in range(len(response.mask)) if response.mask[t]]
    if not tokens:
        return set()
    mean_logprob = math.fsum(responses[i].old_logprobs[t] for i, t in tokens) / len(tokens)
    mean_advantage = math.fsum(responses[i].advantages[t] for i, t in tokens) / len(tokens)
    covs = {
        (i, t): (responses[i].old_logprobs[t] - mean_logprob) * (responses[i].advantages[t] - mean_advantage)
        for i, t in tokens
    }
    num = max(1, int(settings.cov_share * len(tokens)))
    if settings.loss_type == "kl_cov":
        return set(sorted(tokens, key=lambda token: -covs[token])[:num])
    candidates = {token for token in tokens if settings.cov_low < covs[token] < settings.cov_high}
    assert len(candidates) <= num, "the selection would be random"
    return candidates


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
    """Return the factor of each token's policy term, and the tokens that are kept.

    m_t = exp(old_logprobs_t - rollout_logprobs_t). Importance is m_t (token) or the product of all m_t (sequence),
    clamped to min_importance .. max_importance. With IcePop (arXiv 2510.18855) it is m_t inside mask_low .. mask_high,
    otherwise 0. mask drops tokens with m_t outside mask_low .. mask_high, or responses whose product (sequence) or
    geometric mean (geometric) of m_t is outside. reject drops tokens with k2 = log^2 m / 2 or k3 = m - 1 - log m above
    reject_above, or responses by the sum, mean or maximum over their tokens. veto_below drops responses with any
    smaller m_t.
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
            importance[t] = min(max(math.exp(logs[t]), settings.min_importance), settings.max_importance)
        elif settings.importance == "sequence":
            importance[t] = min(max(product, settings.min_importance), settings.max_importance)
        elif settings.importance == "icepop":
            ratio = math.exp(logs[t])
            importance[t] = ratio if settings.mask_low <= ratio <= settings.mask_high else 0.0

    kept = []
    for t in unmasked:
        measured = {"none": None, "token": math.exp(logs[t]), "sequence": product, "geometric": geometric}[
            settings.mask
        ]
        if measured is None or settings.mask_low <= measured <= settings.mask_high:
            kept.append(t)
    if settings.reject != "none":
        assert settings.reject_above is not None
        level, estimator = settings.reject.rsplit("_", 1)
        parts = {t: log**2 / 2 if estimator == "k2" else math.exp(log) - 1 - log for t, log in logs.items()}
        whole = {"seq_sum": math.fsum(parts.values()), "seq_mean": math.fsum(parts.values()) / len(parts)}
        whole["seq_max"] = max(parts.values())
        kept = [t for t in kept if whole.get(level, parts[t]) <= settings.reject_above]
    if settings.veto_below is not None and any(math.exp(log) < settings.veto_below for log in logs.values()):
        kept = []
    return importance, kept


def mean_importance(responses: Sequence[Response], settings: Settings) -> float:
    """Return the mean weight over unmasked tokens, or over non-empty responses if each has one weight; 1 if the mean is
    0.
    """
    weights = [list(correct(response, settings)[0].values()) for response in responses]
    if settings.importance == "sequence":
        weights = [row[:1] for row in weights]
    flat = [weight for row in weights for weight in row]
    return math.fsum(flat) / len(flat) if flat and math.fsum(flat) > 0 else 1.0


def off_policy_tokens(response: Response, settings: Settings) -> set[int]:
    """Return the tokens without a policy term (DeepSeek-V3.2, arXiv 2512.02556, 3.1): A < 0, and the response's mean of
    log(pi_sampler / pi) is above off_policy_threshold."""
    unmasked = [t for t in range(len(response.mask)) if response.mask[t]]
    if settings.off_policy_threshold is None or not unmasked:
        return set()
    drifts = [response.rollout_logprobs[t] - float(response.logprobs[t].detach()) for t in unmasked]
    mean = math.fsum(min(max(drift, -MAX_LOG_RATIO), MAX_LOG_RATIO) for drift in drifts) / len(drifts)
    return {t for t in unmasked if response.advantages[t] < 0} if mean > settings.off_policy_threshold else set()


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
    """Clamp the value to low .. high. A clamped value is a constant without gradient."""
    if float(value.detach()) < low:
        return torch.tensor(low, dtype=torch.float64)
    if float(value.detach()) > high:
        return torch.tensor(high, dtype=torch.float64)
    return value
