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

    @property
    def unmasked(self) -> list[int]:
        return [t for t, is_counted in enumerate(self.mask) if is_counted]


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
                kind, most = settings.kl_penalty_type, settings.kl_clamp
                token = token + settings.kl_beta * kl_penalty(response.logprobs[t], ref, kind, old=old, kl_clamp=most)
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
    pairs = zip(response.advantages, leads, strict=True)
    return replace(response, advantages=[a - settings.distill_beta * limited(lead) for a, lead in pairs])


def token_weights(responses: Sequence[Response], settings: Settings) -> list[float]:
    """Return the token weight of each response. The length of a response is its number of tokens with mask 1."""
    lengths = [sum(response.mask) for response in responses]
    scales = {
        "token-mean": lambda length: 1 / sum(lengths),  # DAPO, arXiv 2503.14476, eq. 8
        "seq-mean-token-mean": lambda length: 1 / len(lengths) / length,  # DeepSeekMath, arXiv 2402.03300, eq. 3
        "seq-mean-token-sum": lambda length: 1 / len(lengths),
        # Dr. GRPO, arXiv 2503.20783, with a constant length
        "seq-mean-token-sum-norm": lambda length: 1 / len(lengths) / settings.max_response_length,
    }
    return [scales[settings.loss_agg_func](length) if length else 0.0 for length in lengths]


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
    if kind == "low_var_kl_weighted":
        # DeepSeek-V3.2, arXiv 2512.02556: times pi / pi_old, which has no gradient where k3 is clamped
        assert old is not None
        ratio = clamp(logprob - old, -MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        value = (ratio if abs(ref - float(logprob.detach())) <= MAX_LOG_RATIO else ratio.detach()) * value
    elif kind != "low_var_kl":
        raise ValueError(kind)
    return value if kl_clamp is None else clamp(value, -math.inf, kl_clamp)


# Policy terms. Each function returns {token: l_t} for the tokens in `kept`.


def actor(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """Return the terms of DeepSeekMath, arXiv 2402.03300, eq. 3."""
    return {t: -clipped_objective(token_ratio(response, t), response.advantages[t], settings) for t in kept}


def dual_clip(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 1912.09729, eq. 5: max(min(r A, clip(r) A), c A) if A < 0."""
    terms = actor(response, kept, settings)
    for t in kept:
        floor = settings.ratio_clip_c * response.advantages[t]
        if response.advantages[t] < 0 and -float(terms[t].detach()) < floor:
            terms[t] = torch.tensor(-floor, dtype=torch.float64)
    return terms


def gspo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2507.18071, eq. 5 and 7: s_i = exp(mean_t log r_t), clipped as a whole."""
    ratio = sequence_ratio(response, kept)
    return {t: -clipped_objective(ratio, response.advantages[t], settings) for t in kept}


def gspo_token(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2507.18071, eq. 13 and 14: s_i,t = sg[s_i] pi_t / sg[pi_t], so each token has its own gradient."""
    ratio = sequence_ratio(response, kept).detach()
    ones = {t: (response.logprobs[t] - response.logprobs[t].detach()).exp() for t in kept}
    return {t: -clipped_objective(ratio * ones[t], response.advantages[t], settings) for t in kept}


def cispo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2506.13585, eq. 4 and 5: -sg[clip(r)] A log pi."""
    low, high = 1 - settings.ratio_clip_eps_low, 1 + settings.ratio_clip_eps_high
    weights = {t: clamp(token_ratio(response, t), low, high).detach() for t in kept}
    return {t: -weights[t] * response.advantages[t] * response.logprobs[t] for t in kept}


def sapo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2511.20347: -f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)). tau depends on the sign of A."""
    terms = {}
    for t in kept:
        tau = settings.sapo_tau_positive if response.advantages[t] > 0 else settings.sapo_tau_negative
        terms[t] = -torch.sigmoid(tau * (token_ratio(response, t) - 1)) * 4 / tau * response.advantages[t]
    return terms


def gmpo(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """arXiv 2507.20673, eq. 4: -A (prod_t r_t)^(1/n). log r_t is at most high if A > 0, otherwise at least -low."""
    if not kept:
        return {}
    low, high = -settings.ratio_clip_eps_low, settings.ratio_clip_eps_high
    limits = {t: (-math.inf, high) if response.advantages[t] > 0 else (low, math.inf) for t in kept}
    mean = torch.stack([clamp(log_ratio(response, t), *limits[t]) for t in kept]).mean().exp()
    return {t: -response.advantages[t] * mean for t in kept}


def reinforce(response: Response, kept: Sequence[int], settings: Settings) -> dict[int, Tensor]:
    """Williams (1992): -A log pi."""
    return {t: -response.advantages[t] * response.logprobs[t] for t in kept}


def by_covariance(response: Response, kept: Sequence[int], settings: Settings, chosen: set[int]) -> dict[int, Tensor]:
    """arXiv 2505.22617, 4.2: clip_cov removes chosen tokens that are not clipped; kl_cov adds |log r|."""
    if settings.loss_type == "kl_cov":
        terms = {t: -token_ratio(response, t) * response.advantages[t] for t in kept}
        gaps = {t: settings.cov_kl * log_ratio(response, t).abs() for t in chosen}
        return {t: term + gaps[t] if t in chosen else term for t, term in terms.items()}
    terms = actor(response, kept, settings)
    for t in chosen & terms.keys():
        ratio, advantage = float(token_ratio(response, t).detach()), response.advantages[t]
        is_high = advantage > 0 and ratio > 1 + settings.ratio_clip_eps_high
        is_low = advantage < 0 and ratio < 1 - settings.ratio_clip_eps_low
        if not is_high and not is_low:
            terms[t] = torch.zeros((), dtype=torch.float64)
    return terms


def chosen_tokens(responses: Sequence[Response], settings: Settings) -> set[tuple[int, int]]:
    """Return (response, token) for the tokens that clip_cov or kl_cov chooses by the covariance of log-prob and
    advantage.

    Means and share are over the mini-batch; log-probs are from before its update. If there are more candidates than the
    share, clip_cov selects at random. No case here has so many candidates.
    """
    tokens = [(i, t) for i, response in enumerate(responses) for t in response.unmasked]
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
    function.__name__: function for function in (actor, dual_clip, gspo, gspo_token, cispo, sapo, gmpo, reinforce)
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
    if not response.unmasked:
        return {}, []
    logs = {t: limited(response.old_logprobs[t] - response.rollout_logprobs[t]) for t in response.unmasked}
    ratios = {t: math.exp(log) for t, log in logs.items()}
    product = math.exp(limited(sum(logs.values())))
    geometric = math.exp(sum(logs.values()) / len(logs))

    importance, kept = dict.fromkeys(ratios, 1.0), list[int]()
    for t, ratio in ratios.items():
        if settings.importance in ("token", "sequence"):
            value = ratio if settings.importance == "token" else product
            importance[t] = min(max(value, settings.min_importance), settings.max_importance)
        elif settings.importance == "icepop":
            importance[t] = ratio if settings.mask_low <= ratio <= settings.mask_high else 0.0
        measured = {"none": None, "token": ratio, "sequence": product, "geometric": geometric}[settings.mask]
        if measured is None or settings.mask_low <= measured <= settings.mask_high:
            kept.append(t)
    if settings.reject != "none":
        assert settings.reject_above is not None
        level, estimator = settings.reject.rsplit("_", 1)
        parts = {t: log**2 / 2 if estimator == "k2" else math.exp(log) - 1 - log for t, log in logs.items()}
        whole = {"seq_sum": math.fsum(parts.values()), "seq_mean": math.fsum(parts.values()) / len(parts)}
        whole["seq_max"] = max(parts.values())
        kept = [t for t in kept if whole.get(level, parts[t]) <= settings.reject_above]
    if settings.veto_below is not None and min(ratios.values()) < settings.veto_below:
        kept = []
    return importance, kept


def mean_importance(responses: Sequence[Response], settings: Settings) -> float:
    """Return the mean weight over unmasked tokens, or over responses if each has one; 1 instead of 0."""
    weights = [list(correct(response, settings)[0].values()) for response in responses]
    if settings.importance == "sequence":
        weights = [row[:1] for row in weights]
    flat = [weight for row in weights for weight in row]
    return math.fsum(flat) / len(flat) if flat and math.fsum(flat) > 0 else 1.0


def off_policy_tokens(response: Response, settings: Settings) -> set[int]:
    """Return the tokens without a policy term (DeepSeek-V3.2, arXiv 2512.02556, 3.1): A < 0, and the response's mean of
    log(pi_sampler / pi) is above off_policy_threshold."""
    if settings.off_policy_threshold is None or not response.unmasked:
        return set()
    drifts = [limited(response.rollout_logprobs[t] - float(response.logprobs[t].detach())) for t in response.unmasked]
    is_off_policy = math.fsum(drifts) / len(drifts) > settings.off_policy_threshold
    return {t for t in response.unmasked if response.advantages[t] < 0 and is_off_policy}


# Arithmetic


def log_ratio(response: Response, t: int) -> Tensor:
    return clamp(response.logprobs[t] - response.old_logprobs[t], -MAX_LOG_RATIO, MAX_LOG_RATIO)


def token_ratio(response: Response, t: int) -> Tensor:
    return log_ratio(response, t).exp()


def sequence_ratio(response: Response, kept: Sequence[int]) -> Tensor:
    """Return exp(mean_t log r_t); NaN without tokens."""
    return torch.stack([log_ratio(response, t) for t in kept]).mean().exp() if kept else torch.tensor(math.nan)


def clipped_objective(ratio: Tensor, advantage: float, settings: Settings) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A)."""
    unclipped = ratio * advantage
    clipped = clamp(ratio, 1 - settings.ratio_clip_eps_low, 1 + settings.ratio_clip_eps_high) * advantage
    return unclipped if float(unclipped.detach()) <= float(clipped.detach()) else clipped


def limited(log: float) -> float:
    return min(max(log, -MAX_LOG_RATIO), MAX_LOG_RATIO)


def clamp(value: Tensor, low: float, high: float) -> Tensor:
    """Clamp the value to low .. high. A clamped value is a constant without gradient."""
    number = float(value.detach())
    if number < low or number > high:
        return torch.tensor(low if number < low else high, dtype=torch.float64)
    return value
