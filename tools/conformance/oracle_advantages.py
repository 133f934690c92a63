"""Oracle of the advantages: compute them sample by sample in Python floats, as written in the papers.

Input: the groups of one step, each a list of `Scored`. Output: for each sample of each group a list with one advantage
per response token. This module shares no code with the vectorized advantages. A sample without a reward gets zeros, and
statistics ignore it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tools.conformance.oracle_losses import kl_penalty

WHITEN_EPS = 1e-8  # added to the variance


@dataclass
class Scored:
    """One sample of a group."""

    length: int  # tokens of the response
    reward: float | None
    step_rewards: list[float] = field(default_factory=list)
    step_ends: list[int] = field(default_factory=list)  # index of the token at which each step ends
    logprobs: list[float] = field(default_factory=list)  # log-probs before the update; needed for a KL in the reward
    ref_logprobs: list[float] = field(default_factory=list)
    scores: dict[str, float | None] = field(default_factory=dict)  # keyed by reward function; needed for gdpo


@dataclass(frozen=True)
class AdvantageSettings:
    """The keys of the config's section `algorithm` that advantages depend on, and rollout.max_response_length."""

    adv_type: str = "grpo"
    normalize_by_std: bool = True
    std_over: str = "group"
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
    pass_k: int | None = None
    reward_weights: dict[str, float] = field(default_factory=dict)


Groups = Sequence[Sequence[Scored]]
Advantages = list[list[list[float]]]  # [group][sample][token]
# Rewards and lengths of a group -> values.
Score = Callable[[Sequence[float], Sequence[int], "AdvantageSettings"], list[float]]


def advantages(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Return the advantages of all tokens with the estimator settings.adv_type."""
    values: Advantages
    if settings.adv_type == "grpo" and settings.std_over == "batch":
        values = _over_batch_deviation(groups, settings)
    elif settings.adv_type == "grpo":
        values = _of_group_scores(groups, settings, is_leave_one_out=False)
    elif settings.adv_type == "rloo":
        values = _of_group_scores(groups, settings, is_leave_one_out=True)
    elif settings.adv_type == "grpo_process":
        values = _grpo_process(groups, settings)
    elif settings.adv_type == "reinforce_plus_plus":
        values = _reinforce_plus_plus(groups, settings)
    elif settings.adv_type == "reinforce_plus_plus_baseline":
        values = _less_group_mean(groups, settings)
    elif settings.adv_type == "grpo_turn":
        values = _grpo_turn(groups, settings)
    elif settings.adv_type in SCORES:
        values = _of_group(groups, settings, SCORES[settings.adv_type])
    elif settings.adv_type == "gdpo":
        values = _gdpo(groups, settings)
    elif settings.adv_type == "none":
        values = [[[0.0] * sample.length for sample in group] for group in groups]
    else:
        raise ValueError(settings.adv_type)
    is_global = settings.adv_type in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    return whitened(groups, values, settings) if settings.normalize_advantages or is_global else values


def zscores(values: Sequence[float], *, by_std: bool, ddof: int, eps: float) -> list[float]:
    """Return (r - mean) / (std + eps), DeepSeekMath (arXiv 2402.03300) 4.1.2; r - mean for Dr. GRPO (arXiv
    2503.20783).
    """
    if len(values) <= ddof or max(values) == min(values):
        return [0.0 for _ in values]
    mean = math.fsum(values) / len(values)
    if not by_std:
        return [value - mean for value in values]
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))
    return [(value - mean) / (std + eps) for value in values]


def leave_one_out(values: Sequence[float]) -> list[float]:
    """Return r_i minus the mean of the other rewards (RLOO, arXiv 2402.14740)."""
    if len(values) < 2 or max(values) == min(values):
        return [0.0 for _ in values]
    result = []
    for i, value in enumerate(values):
        others = [other for j, other in enumerate(values) if j != i]
        result.append(value - math.fsum(others) / len(others))
    return result


def overlong_penalty(length: int, settings: AdvantageSettings) -> float:
    """Return the penalty, 0 or negative, that is added to the reward of a response (DAPO, arXiv 2503.14476, eq. 13)."""
    longest = settings.max_response_length
    cache = settings.overlong_buffer * longest
    if cache == 0 or length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache * settings.overlong_penalty
    return -settings.overlong_penalty


def penalties(sample: Scored, settings: AdvantageSettings) -> list[float]:
    """Return kl_beta KL_t for each token if the KL penalty is in the reward, otherwise zeros."""
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
    """Return the sample's reward plus the overlong penalty, minus the sum of its KL penalties if they are in the
    reward.
    """
    assert sample.reward is not None
    return sample.reward + overlong_penalty(sample.length, settings) - math.fsum(penalties(sample, settings))


def counts(sample: Scored, settings: AdvantageSettings) -> bool:
    """Return True if the sample has a reward that settings.adv_type uses."""
    has_steps = settings.adv_type in ("grpo_process", "grpo_turn") and len(sample.step_rewards) > 0
    return sample.reward is not None or has_steps


def whitened(groups: Groups, values: Advantages, settings: AdvantageSettings) -> Advantages:
    """Return (a - mean) / sqrt(var + 1e-8) over all tokens of samples with a reward. var divides by their number minus
    1.
    """
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
    """For each token, add the normalized rewards of steps that end at or after it (DeepSeekMath, arXiv 2402.03300,
    4.1.3).

    Step rewards are normalized over all steps of the group. The outcome advantage is added too. In a group without
    outcome rewards, the overlong penalty is the outcome.
    """
    result = _of_outcomes_if_any(groups, settings)
    for group, rows in zip(groups, result, strict=True):
        scores = iter(_zscores([reward for sample in group for reward in sample.step_rewards], settings))
        _add_steps(group, rows, [[next(scores) for _ in sample.step_rewards] for sample in group])
    return result


def _grpo_turn(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """As _grpo_process, but normalize each reward over rewards of the same turn in the group (MT-GRPO, arXiv
    2505.11821).
    """
    result = _of_outcomes_if_any(groups, settings)
    for group, rows in zip(groups, result, strict=True):
        own: list[list[float]] = [[] for _ in group]
        for turn in itertools.count():
            members = [i for i, sample in enumerate(group) if len(sample.step_rewards) > turn]
            if not members:
                break
            scores = _zscores([group[i].step_rewards[turn] for i in members], settings)
            for i, score in zip(members, scores, strict=True):
                own[i].append(score)
        _add_steps(group, rows, own)
    return result


def _add_steps(group: Sequence[Scored], rows: list[list[float]], own: Sequence[Sequence[float]]) -> None:
    for sample, row, scores in zip(group, rows, own, strict=True):
        for t in range(sample.length):
            row[t] += math.fsum(score for score, end in zip(scores, sample.step_ends, strict=True) if end >= t)


def _of_outcomes_if_any(groups: Groups, settings: AdvantageSettings) -> Advantages:
    with_outcomes = []
    for group in groups:
        if all(sample.reward is None for sample in group):
            with_outcomes.append([replace(s, reward=0.0) if counts(s, settings) else s for s in group])
        else:
            with_outcomes.append(list(group))
    return _of_group_scores(with_outcomes, settings, is_leave_one_out=False)


def _zscores(values: Sequence[float], settings: AdvantageSettings) -> list[float]:
    return zscores(values, by_std=settings.normalize_by_std, ddof=settings.std_ddof, eps=settings.std_eps)


def deviation(values: Sequence[float], ddof: int) -> float:
    if not values or max(values) == min(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - ddof, 1))


def leave_one_out_zscores(rewards: Sequence[float], lengths: Sequence[int], settings: AdvantageSettings) -> list[float]:
    """Return (r_i - mean) / (std + eps) with mean and std of the other rewards. Return r_i - mean if the others are
    equal.
    """
    result = []
    for i, centered in enumerate(leave_one_out(rewards)):
        std = deviation([reward for j, reward in enumerate(rewards) if j != i], settings.std_ddof)
        result.append(centered / (std + settings.std_eps) if settings.normalize_by_std and std > 0 else centered)
    return result


def less_weighted_mean(rewards: Sequence[float], lengths: Sequence[int], settings: AdvantageSettings) -> list[float]:
    """Return r_i minus the mean weighted by length (OPO, arXiv 2505.23585)."""
    with_tokens = {reward for reward, length in zip(rewards, lengths, strict=True) if length}
    if len(with_tokens) < 2:
        return [0.0 for _ in rewards]  # samples without tokens need no advantage
    baseline = math.fsum(reward * length for reward, length in zip(rewards, lengths, strict=True)) / sum(lengths)
    return [reward - baseline for reward in rewards]


def best_of_k(rewards: Sequence[float], lengths: Sequence[int], settings: AdvantageSettings) -> list[float]:
    """Return the mean drop of the best reward if i leaves a set, over all sets of k with i (PKPO, arXiv 2505.15201)."""
    k = min(settings.pass_k or len(rewards), len(rewards))
    if k < 2 or max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    result = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i]
        gains = [max(reward, *rest) - max(rest) for rest in itertools.combinations(others, k - 1)]
        result.append(math.fsum(gains) / len(gains))
    scale = deviation(rewards, settings.std_ddof) + settings.std_eps if settings.normalize_by_std else 1.0
    return [value / scale for value in result]


SCORES = {"grpo_leave_one_out": leave_one_out_zscores, "opo": less_weighted_mean, "pass_at_k": best_of_k}


def _of_group(groups: Groups, settings: AdvantageSettings, score: Score) -> Advantages:
    result: Advantages = []
    for group in groups:
        members = [sample for sample in group if sample.reward is not None]
        values = iter(score([outcome(s, settings) for s in members], [s.length for s in members], settings))
        result.append([[next(values) if sample.reward is not None else 0.0] * sample.length for sample in group])
    return result


def _over_batch_deviation(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Return r minus its group's mean, divided by the deviation of all rewards of the step (Lite PPO, arXiv
    2508.08221).
    """
    rewards = [outcome(sample, settings) for group in groups for sample in group if sample.reward is not None]
    scale = deviation(rewards, settings.std_ddof) + settings.std_eps
    centered = _of_group_scores(groups, replace(settings, normalize_by_std=False), is_leave_one_out=False)
    return [[[value / scale if value else 0.0 for value in row] for row in rows] for rows in centered]


def _gdpo(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Return the weighted sum of z-scores, one per reward function, normalized over all responses (GDPO, arXiv
    2601.05242).
    """
    sums: list[list[float]] = []
    for group in groups:
        totals = [0.0 for _ in group]
        for name, weight in settings.reward_weights.items():
            found = [i for i, s in enumerate(group) if s.reward is not None and s.scores.get(name) is not None]
            for i, score in zip(found, _zscores([group[i].scores[name] or 0.0 for i in found], settings), strict=True):
                totals[i] += weight * score
        sums.append(totals)
    counted = [
        total
        for group, totals in zip(groups, sums, strict=True)
        for sample, total in zip(group, totals, strict=True)
        if sample.reward is not None and sample.length
    ]
    mean, std = math.fsum(counted) / max(len(counted), 1), deviation(counted, settings.std_ddof)
    result: Advantages = []
    for group, totals in zip(groups, sums, strict=True):
        result.append([])
        for sample, total in zip(group, totals, strict=True):
            value = (total - mean) / (std + settings.std_eps) if sample.reward is not None and std > 0 else 0.0
            result[-1].append([value] * sample.length)
    return result


def _reinforce_plus_plus(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Sum token rewards from each token to the last: -beta KL_t, plus r at the last token (arXiv 2501.03262, gamma
    1).
    """
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
    """Return r minus the mean of its group (arXiv 2501.03262, with baseline)."""
    result: Advantages = []
    for group in groups:
        rewards = [outcome(sample, settings) for sample in group if sample.reward is not None]
        scores = iter(zscores(rewards, by_std=False, ddof=1, eps=0.0))
        result.append([[next(scores) if sample.reward is not None else 0.0] * sample.length for sample in group])
    return result
