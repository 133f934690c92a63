"""Advantages from rewards: one pure function of a group's samples per `algorithm.adv_type`.

Input: the scored groups of a step. Output: the same samples with `advantages`, one finite float32 value per response
token, and 0 on tokens that the policy did not sample. Zero-variance groups and groups of one sample get exactly 0,
unless gdpo or whitening subtracts a step mean that is not 0. Samples without a reward always get 0. reinforce_plus_plus
has no group baseline, so only whole steps of equal values get 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from grpo_mega.batching.layout import sampled_mask
from grpo_mega.config import AlgorithmConfig
from grpo_mega.config.algorithm import STEPWISE
from grpo_mega.errors import RewardError
from grpo_mega.types import Group, Sample


@dataclass(frozen=True)
class Scored:
    """The samples of a group that have a reward, for an estimator."""

    samples: Sequence[Sample]
    outcomes_G: Tensor  # float64, rewards with the overlong penalty
    kls: Sequence[Tensor]  # kl_beta * KL of each sample's tokens, float64
    reward_weights: Mapping[str, float]  # keyed by reward function

    @property
    def rewards_G(self) -> Tensor:
        """Return the outcomes minus the sum of each response's penalties."""
        return self.outcomes_G - torch.tensor([float(kl.sum()) for kl in self.kls], dtype=torch.float64)


def assign_advantages(
    groups: Iterable[Group],
    a: AlgorithmConfig,
    *,
    max_response_length: int,
    kl_penalties: Sequence[Tensor] | None = None,
    reward_weights: Mapping[str, float] = MappingProxyType({}),
) -> list[Sample]:
    """Set the advantages of every sample by a.adv_type. Return all samples as a flat list, in order.

    Samples without a reward get zeros and count in no mean. If a.kl_in is "reward", `kl_penalties` times kl_beta are
    subtracted from the reward ([response_len] per sample, 0 on tokens that are not sampled, in the order of the
    samples; None: no penalty yet).
    `reward_weights` are the weights of the reward functions, for gdpo. `groups` must be all groups of the step, on
    every rank. Raise RewardError if a reward is not finite.
    """
    samples: list[Sample] = []
    rewards: list[Tensor] = []
    counted: list[Sample] = []
    # Advantages of `counted`, in float64, because whitening nearly equal advantages would amplify the rounding of
    # float32.
    rows: list[Tensor] = []
    beta = a.kl_beta if a.has_kl_reward else 0.0
    for group in groups:
        kls = (
            kl_penalties[len(samples) :]
            if kl_penalties is not None
            else [torch.zeros(s.response_len) for s in group.samples]
        )
        pairs = [(s, beta * kl.double()) for s, kl in zip(group.samples, kls, strict=False) if _is_scored(s, a)]
        members = [s for s, _ in pairs]
        # In float64, because float32 rounding would look like variance of equal rewards.
        outcomes = [(s.reward or 0.0) + overlong_penalty(s.response_len, a, max_response_length) for s in members]
        scored = Scored(members, torch.tensor(outcomes, dtype=torch.float64), [kl for _, kl in pairs], reward_weights)
        values = ADVANTAGES[a.adv_type](scored, a)
        rows += [value.expand(s.response_len) for s, value in zip(members, values, strict=True)]
        rewards.append(scored.rewards_G)
        counted += members
        samples += group.samples
    if a.std_over == "batch":
        rows = _scaled(rows, torch.cat(rewards), a)
    elif a.adv_type == "gdpo":
        sums = [float(values_R[0]) for values_R in rows if len(values_R)]
        shift = sum(sums) / max(len(sums), 1)
        rows = _scaled([values_R - shift for values_R in rows], torch.tensor(sums, dtype=torch.float64), a)
    if a.normalize_advantages or a.adv_type in _WHITENED:
        rows = _whitened(rows, [sampled_mask(s) > 0 for s in counted])
    # The mean of a step's z-scores is 0, but its floating-point sum is about 1e-17. Once that is subtracted, a
    # zero-variance group would seem to teach. So advantages that differ from 0 only by rounding become 0.
    rounding = 1e-12 * max((float(values_R.abs().max()) for values_R in rows if len(values_R)), default=0.0)
    for sample in samples:
        sample.advantages = torch.zeros(sample.response_len)
    for sample, values_R in zip(counted, rows, strict=True):
        is_zero_R = (values_R.abs() < rounding) | (sampled_mask(sample) == 0)
        sample.advantages = values_R.masked_fill(is_zero_R, 0.0).float()
    return samples


# Estimators: (scored samples of a group, config) -> float64 advantage of each sample [G], or of each token of each
# sample.


def grpo(g: Scored, a: AlgorithmConfig) -> Tensor:
    """Outcome supervision, DeepSeekMath (arXiv 2402.03300) 4.1.2: every token gets its response's z-score in the group.

    With std_over=batch the deviation is taken later, over all rewards of the step (Lite PPO, arXiv 2508.08221).
    """
    return group_zscore(g.rewards_G, a)


def grpo_process(g: Scored, a: AlgorithmConfig) -> list[Tensor]:
    """Process supervision, DeepSeekMath (arXiv 2402.03300) 4.1.3: step rewards normalised over all steps of the group.

    The advantage of a token is the sum over the steps that end at or after it, 0 after the last step. Rewards for whole
    responses add their z-score (as in `grpo`) on all tokens. If the group has none, the overlong penalty alone is the
    outcome.
    """
    steps = group_zscore(torch.tensor([r for s in g.samples for r in s.step_rewards], dtype=torch.float64), a)
    return _of_steps(g, a, steps.split([len(s.step_rewards) for s in g.samples]) if g.samples else [])


def grpo_turn(g: Scored, a: AlgorithmConfig) -> list[Tensor]:
    """Turn-level supervision, MT-GRPO (arXiv 2505.11821): like `grpo_process`, but normalised per turn.

    A step's reward is normalised over the rewards of the group's samples for the same turn, the k-th step of each.
    """
    of_samples = [torch.zeros(len(s.step_rewards), dtype=torch.float64) for s in g.samples]
    for turn in range(max(map(len, of_samples), default=0)):
        members = [i for i, values in enumerate(of_samples) if len(values) > turn]
        rewards = torch.tensor([g.samples[i].step_rewards[turn] for i in members], dtype=torch.float64)
        for i, zscore in zip(members, group_zscore(rewards, a), strict=True):
            of_samples[i][turn] = zscore
    return _of_steps(g, a, of_samples)


def grpo_leave_one_out(g: Scored, a: AlgorithmConfig) -> Tensor:
    """Return (r_i - mean) / (std + std_eps), with mean and std of the group's other rewards.

    This is RLOO's baseline (arXiv 2402.14740) with GRPO's scale, NeMo-RL's default. If the other rewards are all equal,
    return r_i - mean.
    """
    rewards_G = g.rewards_G
    num = len(rewards_G)
    if num < 2 or not bool(_centered(rewards_G).any()):
        return torch.zeros_like(rewards_G)
    others_GO = rewards_G.expand(num, num)[~torch.eye(num, dtype=torch.bool)].view(num, num - 1)
    centered_G = rewards_G - others_GO.mean(dim=1)
    if not a.normalize_by_std:
        return centered_G
    std_G = torch.stack([_deviation(others, a) for others in others_GO])
    return centered_G / torch.where(std_G > 0, std_G + a.std_eps, 1.0)


def rloo(g: Scored, a: AlgorithmConfig) -> Tensor:
    """Return r_i minus the mean of the group's other rewards (Kool et al. 2019; RLOO, arXiv 2402.14740, eq. 8)."""
    rewards_G = g.rewards_G
    return _centered(rewards_G) * (len(rewards_G) / max(len(rewards_G) - 1, 1))


def reinforce_plus_plus(g: Scored, a: AlgorithmConfig) -> list[Tensor]:
    """REINFORCE++ (arXiv 2501.03262, eqs. 5 and 6): return r minus the KL penalties of the token and of later tokens.

    There is no group baseline. The tokens of the step are whitened together afterwards.
    """
    return [r - kl.flip(0).cumsum(0).flip(0) for r, kl in zip(g.outcomes_G, g.kls, strict=True)]


def reinforce_plus_plus_baseline(g: Scored, a: AlgorithmConfig) -> Tensor:
    """REINFORCE++ with baseline (arXiv 2501.03262, eq. 7): return r minus the group's mean; tokens are whitened
    later.
    """
    return _centered(g.rewards_G)


def opo(g: Scored, a: AlgorithmConfig) -> Tensor:
    """OPO (arXiv 2505.23585): return r_i - sum_j l_j r_j / sum_j l_j, where l are the numbers of sampled tokens.

    This baseline has the least variance if a response's squared gradient grows with its length.
    """
    lengths_G = torch.tensor([s.num_sampled for s in g.samples], dtype=torch.float64)
    if not lengths_G.any():
        return lengths_G
    rewards_G = g.rewards_G - g.rewards_G[lengths_G.argmax()]  # shifted, so equal rewards return exactly 0
    return rewards_G - (lengths_G * rewards_G).sum() / lengths_G.sum()


def pass_at_k(g: Scored, a: AlgorithmConfig) -> Tensor:
    """Return how much r_i adds to the best of k: the mean of max(0, r_i - the best of the set) over all sets of k - 1
    others.

    This is PKPO's leave-one-out estimator of max@k (arXiv 2505.15201). It is scaled so that for k = G the best sample
    gets its lead over the second and all others 0 (arXiv 2503.19595). With normalize_by_std it is divided by the
    group's deviation.
    """
    rewards_G = g.rewards_G
    num = len(rewards_G)
    k = min(a.pass_k or num, num)
    if k < 2:
        return torch.zeros_like(rewards_G)
    sorted_G, order_G = rewards_G.sort()
    # The share of all sets in which the j-th of the others, in ascending order, is the best.
    share_G = torch.tensor([math.comb(j, k - 2) / math.comb(num - 1, k - 1) for j in range(num)], dtype=torch.float64)
    values_G = torch.zeros_like(rewards_G)
    values_G[order_G] = (sorted_G[:, None] - sorted_G).tril(-1) @ share_G
    is_divided = a.normalize_by_std and bool(values_G.any())
    return values_G / (_deviation(rewards_G, a) + a.std_eps) if is_divided else values_G


def gdpo(g: Scored, a: AlgorithmConfig) -> Tensor:
    """GDPO (arXiv 2601.05242): return sum_k w_k times the group's z-score of the k-th reward function's scores.

    w_k is the function's weight. The sums are normalised over all samples of the step afterwards.
    """
    total_G = torch.zeros(len(g.samples), dtype=torch.float64)
    for name, weight in g.reward_weights.items():
        found = [i for i, sample in enumerate(g.samples) if sample.scores.get(name) is not None]
        scores = torch.tensor([g.samples[i].scores[name] for i in found], dtype=torch.float64)
        total_G[found] += weight * group_zscore(scores, a)
    return total_G


def none(g: Scored, a: AlgorithmConfig) -> Tensor:
    """Return 0: rewards are only logged, and the loss adds the teacher's part."""
    return torch.zeros_like(g.outcomes_G)


# Keyed by the names in a config (algorithm.adv_type).
ADVANTAGES: Mapping[str, Callable[[Scored, AlgorithmConfig], Tensor | list[Tensor]]] = {
    f.__name__: f for f in (grpo, grpo_process, grpo_turn, grpo_leave_one_out, rloo, opo, pass_at_k, gdpo)
} | {f.__name__: f for f in (reinforce_plus_plus, reinforce_plus_plus_baseline, none)}
WITHOUT_BASELINE = frozenset({"reinforce_plus_plus"})  # groups of equal rewards teach, too
_WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}


def group_zscore(rewards_G: Tensor, a: AlgorithmConfig) -> Tensor:
    """Return (r - mean) / (std + std_eps) over the rewards of one group; 0 if all are equal or there is only one.

    std divides by G - std_ddof: slime, verl, RLinf and TRL use 1, Megatron-LM 0. Without normalize_by_std return r -
    mean, so easy and hard prompts weigh no more than others (Dr. GRPO, arXiv 2503.20783, section 3.1).
    """
    centered = _centered(rewards_G)
    if not a.normalize_by_std or a.std_over == "batch" or not bool(centered.any()):
        return centered
    return centered / (_deviation(rewards_G, a) + a.std_eps)


def overlong_penalty(length: int, a: AlgorithmConfig, max_response_length: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    It is 0 up to the buffer and falls to -a.overlong_penalty at max_response_length. The length counts inserted tokens
    too, as that limit does.
    """
    buffer = round(a.overlong_buffer * max_response_length)
    if buffer == 0:
        return 0.0
    excess = length - (max_response_length - buffer)
    return -a.overlong_penalty * min(max(excess / buffer, 0.0), 1.0)


def _deviation(values: Tensor, a: AlgorithmConfig) -> Tensor:
    """Return the standard deviation, with the number of values minus std_ddof as divisor; 0 if all are equal."""
    return (_centered(values).square().sum() / max(len(values) - a.std_ddof, 1)).sqrt()


def _scaled(rows: Sequence[Tensor], values: Tensor, a: AlgorithmConfig) -> list[Tensor]:
    """Return the rows divided by the deviation of `values`; 0 if these are all equal."""
    deviation = _deviation(values, a)
    return [values_R / (deviation + a.std_eps) if deviation > 0 else torch.zeros_like(values_R) for values_R in rows]


def _whitened(rows: Sequence[Tensor], is_sampled: Sequence[Tensor], eps: float = 1e-8) -> list[Tensor]:
    """Return the rows shifted and scaled to mean 0 and standard deviation 1 over all sampled tokens.

    The result is (a - mean) / sqrt(var + eps), where var divides by the number of tokens minus one, as in verl; 0 if
    all are equal.
    """
    sampled = [values_R[is_sampled_R] for values_R, is_sampled_R in zip(rows, is_sampled, strict=True)]
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *sampled])
    has_variance = bool((values != values[:1]).any())
    mean, scale = values.mean(), torch.rsqrt(values.var() + eps) if has_variance else 0.0
    return [(values_R - mean) * scale for values_R in rows]


def _centered(rewards: Tensor) -> Tensor:
    """Return r - mean. Equal rewards are compared exactly, because std + eps would amplify a rounding error of the
    mean.
    """
    if rewards.numel() == 0 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def _of_steps(g: Scored, a: AlgorithmConfig, of_samples: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of the steps' values that end at or after each token, plus the z-scores of whole responses."""
    has_outcome = any(s.reward is not None for s in g.samples)
    whole = [i for i, s in enumerate(g.samples) if s.reward is not None or not has_outcome]
    result: list[Tensor] = []
    for s, values in zip(g.samples, of_samples, strict=True):
        ends = torch.tensor(s.step_ends, dtype=torch.int64)
        at_ends_R = torch.zeros(s.response_len, dtype=torch.float64).index_add(0, ends, values)
        result.append(at_ends_R.flip(0).cumsum(0).flip(0))
    for i, zscore in zip(whole, group_zscore(g.rewards_G[whole], a), strict=True):
        result[i] = result[i] + zscore
    return result


def _is_scored(sample: Sample, a: AlgorithmConfig) -> bool:
    """Return True if the sample has a reward that a.adv_type uses. Raise RewardError if a reward is not finite."""
    if any(not math.isfinite(r) for r in [*sample.step_rewards, sample.reward or 0.0]):
        raise RewardError(
            f"sample {sample.index} of prompt {sample.prompt.id} has reward {sample.reward} and step rewards"
            f" {sample.step_rewards} from scores {sample.scores}; a reward function must return finite numbers, or None"
            " for none"
        )
    return sample.is_scored if a.adv_type in STEPWISE else sample.reward is not None
