"""Advantages from rewards: one pure function of a group's samples per `algorithm.adv_type`.

In: the scored groups of a step. Out: the same samples with `advantages`, one float32 value per response token. All are finite:
zero-variance groups, groups of one sample and samples without a reward get exactly 0. reinforce_plus_plus has no group
baseline: there only samples without a reward get 0, and whole steps of equal values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from grpo_mega.config import AlgorithmConfig
from grpo_mega.errors import RewardError
from grpo_mega.types import Group, Sample


def assign_advantages(
    groups: Iterable[Group],
    a: AlgorithmConfig,
    *,
    max_response_length: int,
    kl_penalties: Sequence[Tensor] | None = None,
) -> list[Sample]:
    """Set the advantages of every sample by a.adv_type, and return the samples, flat and in order.

    Samples without a reward get zeros and are in no mean. `kl_penalties` ([response_len] per sample, in the order of the
    samples) are subtracted from the reward, times kl_beta, where a.kl_in is "reward"; None: there is no penalty (yet).
    `groups` must be all groups of the step, on every rank. Raises RewardError for a reward that is not finite.
    """
    samples: list[Sample] = []
    beta = a.kl_beta if a.has_kl_reward else 0.0
    for group in groups:
        kls = kl_penalties[len(samples) :] if kl_penalties is not None else [torch.zeros(s.response_len) for s in group.samples]
        scored = [(s, beta * kl.double()) for s, kl in zip(group.samples, kls, strict=False) if _is_scored(s, a)]
        for sample in group.samples:
            sample.advantages = torch.zeros(sample.response_len, dtype=torch.float64)
        members, penalties = [s for s, _ in scored], [kl for _, kl in scored]
        values = ADVANTAGES[a.adv_type](members, _outcomes(members, a, max_response_length), penalties, a)
        for sample, values_R in zip(members, values, strict=True):
            sample.advantages = values_R.contiguous()
        samples.extend(group.samples)
    if a.normalize_advantages or a.adv_type in _WHITENED:
        whiten([sample for sample in samples if _is_scored(sample, a)])
    for sample in samples:  # not before: whitening advantages that differ by little would amplify the rounding of float32
        assert sample.advantages is not None
        sample.advantages = sample.advantages.float()
    return samples


# Estimators: (scored samples of a group, their outcomes [G], kl_beta * KL of their tokens, config) -> float64 advantages of
# their tokens. An outcome is the reward with the overlong penalty.


def grpo(samples: Sequence[Sample], outcomes_G: Tensor, kls: Sequence[Tensor], a: AlgorithmConfig) -> list[Tensor]:
    """Outcome supervision, DeepSeekMath (arXiv 2402.03300) 4.1.2: give every token its response's z-score in the group."""
    return _on_all_tokens(samples, group_zscore(_less_kl(outcomes_G, kls), a))


def grpo_process(samples: Sequence[Sample], outcomes_G: Tensor, kls: Sequence[Tensor], a: AlgorithmConfig) -> list[Tensor]:
    """Process supervision, DeepSeekMath (arXiv 2402.03300) 4.1.3: normalise step rewards over all steps of the group; the
    advantage of a token is the sum over the steps that end at or after it, 0 after the last step.

    Rewards for whole responses add their z-score (as in `grpo`) on all tokens. In a group without any, the overlong penalty
    alone is the outcome.
    """
    steps = group_zscore(torch.tensor([r for s in samples for r in s.step_rewards], dtype=torch.float64), a)
    of_samples = steps.split([len(s.step_rewards) for s in samples]) if samples else []
    has_outcome = any(s.reward is not None for s in samples)
    whole = [i for i, s in enumerate(samples) if s.reward is not None or not has_outcome]
    zscores = group_zscore(_less_kl(outcomes_G[whole], [kls[i] for i in whole]), a)
    result = [_sum_of_later(s.step_ends, values, s.response_len) for s, values in zip(samples, of_samples, strict=True)]
    for i, zscore in zip(whole, zscores, strict=True):
        result[i] = result[i] + zscore
    return result


def rloo(samples: Sequence[Sample], outcomes_G: Tensor, kls: Sequence[Tensor], a: AlgorithmConfig) -> list[Tensor]:
    """Return r_i less the mean of the group's other rewards (Kool et al. 2019; RLOO, arXiv 2402.14740, eq. 8)."""
    rewards = _less_kl(outcomes_G, kls)
    return _on_all_tokens(samples, _centered(rewards) * (len(rewards) / max(len(rewards) - 1, 1)))


def reinforce_plus_plus(
    samples: Sequence[Sample], outcomes_G: Tensor, kls: Sequence[Tensor], a: AlgorithmConfig
) -> list[Tensor]:
    """REINFORCE++ (arXiv 2501.03262, eqs. 5 and 6): return r less the KL penalties of the token and of later ones.

    There is no group baseline; the tokens of the step are whitened together afterwards.
    """
    return [r - kl.flip(0).cumsum(0).flip(0) for r, kl in zip(outcomes_G, kls, strict=True)]


def reinforce_plus_plus_baseline(
    samples: Sequence[Sample], outcomes_G: Tensor, kls: Sequence[Tensor], a: AlgorithmConfig
) -> list[Tensor]:
    """REINFORCE++ with baseline (arXiv 2501.03262, eq. 7): return r less the group's mean; tokens are whitened later."""
    return _on_all_tokens(samples, _centered(_less_kl(outcomes_G, kls)))


# By the names that a config uses (algorithm.adv_type).
ADVANTAGES: Mapping[str, Callable[[Sequence[Sample], Tensor, Sequence[Tensor], AlgorithmConfig], list[Tensor]]] = {
    f.__name__: f for f in (grpo, grpo_process, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline)
}
_WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}


def group_zscore(rewards_G: Tensor, a: AlgorithmConfig) -> Tensor:
    """Return (r - mean) / (std + std_eps) over the rewards of one group; 0 where all are equal, or where there is only one.

    std divides by G - std_ddof: slime, verl, RLinf and TRL use 1, Megatron-LM 0. Without normalize_by_std: r - mean, which
    gives easy and hard prompts no more weight than others (Dr. GRPO, arXiv 2503.20783, section 3.1).
    """
    centered = _centered(rewards_G)
    if not a.normalize_by_std or not bool(centered.any()):
        return centered
    std = (centered.square().sum() / (rewards_G.numel() - a.std_ddof)).sqrt()
    return centered / (std + a.std_eps)


def whiten(samples: Sequence[Sample], eps: float = 1e-8) -> None:
    """Shift and scale the advantages to mean 0 and standard deviation 1 over all response tokens, in place.

    (a - mean) / sqrt(var + eps), where var divides by the number of tokens less one, as in verl; 0 where all are equal.
    """
    advantages = [sample.advantages for sample in samples if sample.advantages is not None]
    values = torch.cat(advantages).double() if advantages else torch.zeros(0, dtype=torch.float64)
    if values.numel() == 0:
        return
    mean = values.mean()
    has_variance = bool((values != values[0]).any())
    scale = torch.rsqrt(values.var() + eps) if has_variance else 0.0
    for values_R in advantages:
        values_R.copy_((values_R.double() - mean) * scale)


def overlong_penalty(length: int, a: AlgorithmConfig, max_response_length: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to the buffer, down to -a.overlong_penalty at
    max_response_length."""
    buffer = round(a.overlong_buffer * max_response_length)
    if buffer == 0:
        return 0.0
    excess = length - (max_response_length - buffer)
    return -a.overlong_penalty * min(max(excess / buffer, 0.0), 1.0)


def _outcomes(samples: Sequence[Sample], a: AlgorithmConfig, max_response_length: int) -> Tensor:
    """Return reward + overlong penalty [G], in float64: the rounding of float32 would look like a variance of equal rewards."""
    outcomes = [(s.reward or 0.0) + overlong_penalty(s.response_len, a, max_response_length) for s in samples]
    return torch.tensor(outcomes, dtype=torch.float64)


def _less_kl(outcomes_G: Tensor, kls: Sequence[Tensor]) -> Tensor:
    return outcomes_G - torch.tensor([float(kl.sum()) for kl in kls], dtype=torch.float64)


def _centered(rewards: Tensor) -> Tensor:
    """Return r - mean. Equal rewards are compared exactly: std + eps would amplify a mean that differs by one rounding."""
    if rewards.numel() == 0 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def _on_all_tokens(samples: Sequence[Sample], values: Tensor) -> list[Tensor]:
    return [value.expand(s.response_len) for s, value in zip(samples, values, strict=True)]


def _sum_of_later(ends: Sequence[int], values: Tensor, length: int) -> Tensor:
    """Return [length] float64: for each token the sum of the `values` of the steps that end at or after it."""
    at_ends = torch.zeros(length, dtype=torch.float64).index_add(0, torch.tensor(ends, dtype=torch.int64), values)
    return at_ends.flip(0).cumsum(0).flip(0)


def _is_scored(sample: Sample, a: AlgorithmConfig) -> bool:
    """Return True if the sample has a reward that a.adv_type uses. Raises RewardError for one that is not finite."""
    if any(not math.isfinite(r) for r in [*sample.step_rewards, sample.reward or 0.0]):
        raise RewardError(
            f"sample {sample.index} of prompt {sample.prompt.id} has reward {sample.reward} and step rewards "
            f"{sample.step_rewards} from scores {sample.scores}; a reward function must return finite numbers, or None for none"
        )
    return sample.is_scored if a.adv_type == "grpo_process" else sample.reward is not None
