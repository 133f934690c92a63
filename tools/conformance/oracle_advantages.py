"""Oracle of the advantages: compute them sample by sample in Python floats, as the papers print them.

In: the groups of one step, each a list of `Scored`. Out: for each sample of each group a list with one advantage per response
token. This module shares no code with the vectorised advantages. A sample without a reward gets zeros and is in no statistic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from tools.conformance.oracle_losses import kl_penalty

WHITEN_EPS = 1e-8  # added to the variance


@dataclass
class Scored:
    """One sample of a group."""

    length: int  # of the response, in tokens
    reward: float | None
    step_rewards: list[float] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)  # index of the token at which each step ends
    logprobs: list[float] = field(default_factory=list)  # of the policy before the update; for a KL in the reward
    ref_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class AdvantageSettings:
    """The keys of the config's section `algorithm` that advantages depend on; max_response_length is the rollout's."""

    adv_type: str = "grpo"
    normalize_by_std: bool = True
    std_ddof: int = 1
    std_eps: float = 1e-6
    normalize_advantages: bool = False
    kl_beta: float = 0.0
    kl_in: str = "loss"
    kl_penalty_type: str = "low_var_kl"
    kl_clamp: float | None = 10.0
    overlong_buffer: float = 0.0
    overlong_penalty: float = 1.0
    max_response_length: int = 1


Groups = Sequence[Sequence[Scored]]
Advantages = list[list[list[float]]]  # [group][sample][token]


def advantages(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Return the advantages of all tokens by the estimator settings.adv_type."""
    if settings.adv_type == "grpo":
        values = _of_group_scores(groups, settings, is_leave_one_out=False)
    elif settings.adv_type == "rloo":
        values = _of_group_scores(groups, settings, is_leave_one_out=True)
    elif settings.adv_type == "grpo_process":
        values = _grpo_process(groups, settings)
    elif settings.adv_type == "reinforce_plus_plus":
        values = _reinforce_plus_plus(groups, settings)
    elif settings.adv_type == "reinforce_plus_plus_baseline":
        values = _less_group_mean(groups, settings)
    else:
        raise ValueError(settings.adv_type)
    is_global = settings.adv_type in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    return whitened(groups, values, settings) if settings.normalize_advantages or is_global else values


def zscores(values: Sequence[float], *, by_std: bool, ddof: int, eps: float) -> list[float]:
    """Return (r - mean) / (std + eps), DeepSeekMath (arXiv 2402.03300) 4.1.2; r - mean for Dr. GRPO (arXiv 2503.20783)."""
    if len(values) <= ddof or max(values) == min(values):
        return [0.0 for _ in values]
    mean = math.fsum(values) / len(values)
    if not by_std:
        return [value - mean for value in values]
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))
    return [(value - mean) / (std + eps) for value in values]


def leave_one_out(values: Sequence[float]) -> list[float]:
    """Return r_i less the mean of the others (RLOO, arXiv 2402.14740)."""
    if len(values) < 2 or max(values) == min(values):
        return [0.0 for _ in values]
    result = []
    for i, value in enumerate(values):
        others = [other for j, other in enumerate(values) if j != i]
        result.append(value - math.fsum(others) / len(others))
    return result


def overlong_penalty(length: int, settings: AdvantageSettings) -> float:
    """Return the addend to the reward of a response of this length (DAPO, arXiv 2503.14476, eq. 13)."""
    longest = settings.max_response_length
    cache = settings.overlong_buffer * longest
    if cache == 0 or length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache * settings.overlong_penalty
    return -settings.overlong_penalty


def penalties(sample: Scored, settings: AdvantageSettings) -> list[float]:
    """Return kl_beta KL_t for each token if the KL penalty is in the reward, else zeros."""
    if settings.kl_in != "reward" or settings.kl_beta == 0:
        return [0.0] * sample.length
    result = []
    for t in range(sample.length):
        logprob, ref = sample.logprobs[t], sample.ref_logprobs[t]
        tensor = torch.tensor(logprob, dtype=torch.float64)
        kl = kl_penalty(tensor, ref, settings.kl_penalty_type, old=logprob, kl_clamp=settings.kl_clamp)
        result.append(settings.kl_beta * float(kl))
    return result


def outcome(sample: Scored, settings: AdvantageSettings) -> float:
    """Return the reward of a sample with the overlong penalty, less the sum of its tokens' KL if that is in the reward."""
    assert sample.reward is not None
    return sample.reward + overlong_penalty(sample.length, settings) - math.fsum(penalties(sample, settings))


def counts(sample: Scored, settings: AdvantageSettings) -> bool:
    """Return True if the sample has a reward that settings.adv_type uses."""
    return sample.reward is not None or (settings.adv_type == "grpo_process" and len(sample.step_rewards) > 0)


def whitened(groups: Groups, values: Advantages, settings: AdvantageSettings) -> Advantages:
    """Return (a - mean) / sqrt(var + 1e-8) over all tokens of samples with a reward; var divides by their number less one."""
    tokens = []
    for group, rows in zip(groups, values, strict=True):
        for sample, row in zip(group, rows, strict=True):
            if counts(sample, settings):
                tokens.extend(row)
    has_variance = len(tokens) > 1 and max(tokens) != min(tokens)
    mean = math.fsum(tokens) / len(tokens) if tokens else 0.0
    var = math.fsum((token - mean) ** 2 for token in tokens) / (len(tokens) - 1) if has_variance else 0.0
    result: Advantages = []
    for group, rows in zip(groups, values, strict=True):
        result.append([])
        for sample, row in zip(group, rows, strict=True):
            has_value = counts(sample, settings) and has_variance
            result[-1].append([(value - mean) / math.sqrt(var + WHITEN_EPS) if has_value else 0.0 for value in row])
    return result


def _of_group_scores(groups: Groups, settings: AdvantageSettings, *, is_leave_one_out: bool) -> Advantages:
    result: Advantages = []
    for group in groups:
        rewards = [outcome(sample, settings) for sample in group if sample.reward is not None]
        if is_leave_one_out:
            scores = iter(leave_one_out(rewards))
        else:
            ddof, eps = settings.std_ddof, settings.std_eps
            scores = iter(zscores(rewards, by_std=settings.normalize_by_std, ddof=ddof, eps=eps))
        result.append([[next(scores) if sample.reward is not None else 0.0] * sample.length for sample in group])
    return result


def _grpo_process(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Add, for each token, the normalised rewards of the steps that end at or after it (DeepSeekMath, arXiv 2402.03300, 4.1.3).

    Step rewards are normalised over all steps of the group. The outcome advantage is added if there are outcome rewards; in a
    group without any, the overlong penalty is the outcome.
    """
    with_outcomes = []
    for group in groups:
        if all(sample.reward is None for sample in group):
            with_outcomes.append([replace(s, reward=0.0) if counts(s, settings) else s for s in group])
        else:
            with_outcomes.append(list(group))
    result = _of_group_scores(with_outcomes, settings, is_leave_one_out=False)
    for group, rows in zip(groups, result, strict=True):
        steps = [reward for sample in group for reward in sample.step_rewards]
        ddof, eps = settings.std_ddof, settings.std_eps
        scores = iter(zscores(steps, by_std=settings.normalize_by_std, ddof=ddof, eps=eps))
        for sample, row in zip(group, rows, strict=True):
            own = [next(scores) for _ in sample.step_rewards]
            for t in range(sample.length):
                row[t] += math.fsum(score for score, end in zip(own, sample.step_ends, strict=True) if end >= t)
    return result


def _reinforce_plus_plus(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Sum, from each token on, r at the last token and -beta KL_t at every token (arXiv 2501.03262, gamma 1)."""
    result: Advantages = []
    for group in groups:
        result.append([])
        for sample in group:
            if sample.reward is None:
                result[-1].append([0.0] * sample.length)
                continue
            token_rewards = [-penalty for penalty in penalties(sample, settings)]
            if sample.length:
                token_rewards[-1] += sample.reward + overlong_penalty(sample.length, settings)
            result[-1].append([math.fsum(token_rewards[t:]) for t in range(sample.length)])
    return result


def _less_group_mean(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Return r less the mean of its group (arXiv 2501.03262, with baseline)."""
    result: Advantages = []
    for group in groups:
        rewards = [outcome(sample, settings) for sample in group if sample.reward is not None]
        scores = iter(zscores(rewards, by_std=False, ddof=1, eps=0.0))
        result.append([[next(scores) if sample.reward is not None else 0.0] * sample.length for sample in group])
    return result
