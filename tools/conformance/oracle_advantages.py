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


def advantages(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Return the advantages of all tokens with the estimator settings.adv_type."""
    name = settings.adv_type
    if name == "grpo" and settings.std_over == "batch":
        values = over_batch_deviation(groups, settings)
    elif name in SCORES:
        values = of_groups(groups, settings, SCORES[name])
    else:
        values = ESTIMATORS[name](groups, settings)
    is_global = name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    return whitened(groups, values, settings) if settings.normalize_advantages or is_global else values


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
    """Return the reward plus the overlong penalty, minus the KL penalties if they are in the reward."""
    assert sample.reward is not None
    return sample.reward + overlong_penalty(sample.length, settings) - math.fsum(penalties(sample, settings))


def counts(sample: Scored, settings: AdvantageSettings) -> bool:
    """Return True if the sample has a reward that settings.adv_type uses."""
    has_steps = settings.adv_type in ("grpo_process", "grpo_turn") and len(sample.step_rewards) > 0
    return sample.reward is not None or has_steps


def whitened(groups: Groups, values: Advantages, settings: AdvantageSettings) -> Advantages:
    """Return (a - mean) / sqrt(var + 1e-8) over all tokens of samples with a reward. var has ddof 1."""
    pairs = [list(zip(group, rows, strict=True)) for group, rows in zip(groups, values, strict=True)]
    tokens = [token for group in pairs for sample, row in group if counts(sample, settings) for token in row]
    if len(tokens) < 2 or max(tokens) == min(tokens):
        return [[[0.0 for _ in row] for row in rows] for rows in values]
    mean, std = mean_of(tokens), math.sqrt(deviation(tokens, 1) ** 2 + WHITEN_EPS)
    return [
        [[(value - mean) / std if counts(sample, settings) else 0.0 for value in row] for sample, row in group]
        for group in pairs
    ]


def mean_of(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], ddof: int) -> float:
    if not values or max(values) == min(values):
        return 0.0
    mean = mean_of(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - ddof, 1))


# Scores of a group: a value per reward. `lengths` has the tokens of each response.


def of_groups(groups: Groups, settings: AdvantageSettings, score: Score) -> Advantages:
    """Return the score of each sample for each of its tokens. Scores cover the samples of a group with a reward."""
    result: Advantages = []
    for group in groups:
        members = [sample for sample in group if sample.reward is not None]
        values = iter(score([outcome(s, settings) for s in members], [s.length for s in members], settings))
        result.append([[next(values) if sample.reward is not None else 0.0] * sample.length for sample in group])
    return result


def zscores(rewards: Sequence[float], lengths: Sequence[int], settings: AdvantageSettings) -> list[float]:
    """Return (r - mean) / (std + eps), arXiv 2402.03300, 4.1.2; r - mean for Dr. GRPO, arXiv 2503.20783."""
    if len(rewards) <= settings.std_ddof:
        return [0.0 for _ in rewards]
    scale = deviation(rewards, settings.std_ddof) + settings.std_eps if settings.normalize_by_std else 1.0
    return [value / scale if value else 0.0 for value in less_mean(rewards, lengths, settings)]


def less_mean(rewards: Sequence[float], lengths: Sequence[int], settings: AdvantageSettings) -> list[float]:
    """Return r minus the mean of its group (arXiv 2501.03262, with baseline)."""
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    mean = mean_of(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int], settings: AdvantageSettings) -> list[float]:
    """Return r_i minus the mean of the other rewards (RLOO, arXiv 2402.14740)."""
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0 for _ in rewards]
    return [reward - mean_of(others) for reward, others in with_others(rewards)]


def with_others(rewards: Sequence[float]) -> list[tuple[float, list[float]]]:
    """Return each reward with all other rewards."""
    return [(reward, [other for j, other in enumerate(rewards) if j != i]) for i, reward in enumerate(rewards)]


def leave_one_out_zscores(rewards: Sequence[float], lengths: Sequence[int], settings: AdvantageSettings) -> list[float]:
    """Return (r_i - mean) / (std + eps) over the other rewards, or r_i - mean if they are equal."""
    result = []
    for centered, (_, others) in zip(leave_one_out(rewards, lengths, settings), with_others(rewards), strict=True):
        std = deviation(others, settings.std_ddof)
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
    scale = deviation(rewards, settings.std_ddof) + settings.std_eps if settings.normalize_by_std else 1.0
    result = []
    for reward, others in with_others(rewards):
        gains = [max(reward, *rest) - max(rest) for rest in itertools.combinations(others, k - 1)]
        result.append(mean_of(gains) / scale)
    return result


Score = Callable[[Sequence[float], Sequence[int], AdvantageSettings], list[float]]
SCORES: dict[str, Score] = {
    "grpo": zscores,
    "rloo": leave_one_out,
    "reinforce_plus_plus_baseline": less_mean,
    "grpo_leave_one_out": leave_one_out_zscores,
    "opo": less_weighted_mean,
    "pass_at_k": best_of_k,
}


# Estimators that need more than the rewards of one group


def grpo_process(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """For each token, add the normalized rewards of steps that end at or after it (DeepSeekMath, arXiv 2402.03300,
    4.1.3).

    Step rewards are normalized over all steps of the group. The outcome advantage is added too. In a group without
    outcome rewards, the overlong penalty is the outcome.
    """
    result = of_outcomes_if_any(groups, settings)
    for group, rows in zip(groups, result, strict=True):
        scores = iter(zscores([reward for sample in group for reward in sample.step_rewards], (), settings))
        add_steps(group, rows, [[next(scores) for _ in sample.step_rewards] for sample in group])
    return result


def grpo_turn(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """As grpo_process, but normalize over rewards of the same turn (MT-GRPO, arXiv 2505.11821)."""
    result = of_outcomes_if_any(groups, settings)
    for group, rows in zip(groups, result, strict=True):
        own: list[list[float]] = [[] for _ in group]
        for turn in range(max((len(sample.step_rewards) for sample in group), default=0)):
            members = [i for i, sample in enumerate(group) if len(sample.step_rewards) > turn]
            scores = zscores([group[i].step_rewards[turn] for i in members], (), settings)
            for i, score in zip(members, scores, strict=True):
                own[i].append(score)
        add_steps(group, rows, own)
    return result


def of_outcomes_if_any(groups: Groups, settings: AdvantageSettings) -> Advantages:
    with_outcomes = [
        [replace(s, reward=0.0) if counts(s, settings) else s for s in group]
        if all(sample.reward is None for sample in group)
        else group
        for group in groups
    ]
    return of_groups(with_outcomes, settings, zscores)


def add_steps(group: Sequence[Scored], rows: list[list[float]], own: Sequence[Sequence[float]]) -> None:
    for sample, row, scores in zip(group, rows, own, strict=True):
        for t in range(sample.length):
            row[t] += math.fsum(score for score, end in zip(scores, sample.step_ends, strict=True) if end >= t)


def over_batch_deviation(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Divide r minus its group's mean by the deviation of all rewards (Lite PPO, arXiv 2508.08221)."""
    rewards = [outcome(sample, settings) for group in groups for sample in group if sample.reward is not None]
    scale = deviation(rewards, settings.std_ddof) + settings.std_eps
    centered = of_groups(groups, settings, less_mean)
    return [[[value / scale if value else 0.0 for value in row] for row in rows] for rows in centered]


def gdpo(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Normalize the weighted sums of z-scores per reward function over all responses (arXiv 2601.05242)."""
    sums: list[list[tuple[Scored, float]]] = []  # each sample with its weighted sum
    for group in groups:
        totals = [0.0 for _ in group]
        for name, weight in settings.reward_weights.items():
            found = [i for i, s in enumerate(group) if s.reward is not None and s.scores.get(name) is not None]
            scores = zscores([group[i].scores[name] or 0.0 for i in found], (), settings)
            for i, score in zip(found, scores, strict=True):
                totals[i] += weight * score
        sums.append(list(zip(group, totals, strict=True)))
    counted = [total for group in sums for sample, total in group if sample.reward is not None and sample.length]
    std = deviation(counted, settings.std_ddof)
    if std == 0:
        return no_advantages(groups, settings)
    mean, scale = mean_of(counted), std + settings.std_eps
    return [
        [[(total - mean) / scale if sample.reward is not None else 0.0] * sample.length for sample, total in group]
        for group in sums
    ]


def reinforce_plus_plus(groups: Groups, settings: AdvantageSettings) -> Advantages:
    """Sum -beta KL_t from each token to the last, and r at the last token (arXiv 2501.03262, gamma 1)."""
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


def no_advantages(groups: Groups, settings: AdvantageSettings) -> Advantages:
    return [[[0.0] * sample.length for sample in group] for group in groups]


ESTIMATORS: dict[str, Callable[[Groups, AdvantageSettings], Advantages]] = {
    "grpo_process": grpo_process,
    "grpo_turn": grpo_turn,
    "gdpo": gdpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "none": no_advantages,
}
