"""Advantages from rewards: DeepSeekMath's outcome supervision (arXiv 2402.03300, section 4.1.2).

In: a step's groups, scored. Out: the same samples with `advantages` set to one float32 value per response token. All finite:
groups without spread, groups of one sample and samples without a reward give exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from grpo_mega.errors import RewardError
from grpo_mega.types import Group, Sample


def group_zscore(rewards: Tensor, *, by_std: bool = True, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) over the [G] rewards of one group; 0 where all are equal, or where there is only one.

    std divides by G - ddof: 1 is what slime, verl, RLinf and TRL use, 0 what Megatron-LM uses. Not `by_std`: r - mean, which
    gives easy and hard prompts no more weight than others (Dr. GRPO, arXiv 2503.20783, section 3.1).
    """
    # Compared exactly, since the mean of equal rewards may differ from them by one rounding, which std + eps would blow up.
    if rewards.numel() <= ddof or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centered = rewards - rewards.mean()
    if not by_std:
        return centered
    std = (centered.square().sum() / (rewards.numel() - ddof)).sqrt()
    return centered / (std + eps)


def assign(groups: Iterable[Group], *, normalize: bool, by_std: bool = True, ddof: int = 1, eps: float = 1e-6) -> list[Sample]:
    """Sets every sample's advantages to its reward's z-score in its group, and returns the samples, flat and in order.

    Samples whose reward is None get zeros and count in no mean. `normalize` whitens on top of that, over all response
    tokens of the samples that have a reward; `groups` must then be all groups of the step, not one rank's.
    Raises RewardError for a reward that is not finite.
    """
    samples: list[Sample] = []
    for group in groups:
        scored = [(sample, reward) for sample in group.samples if (reward := _reward(sample)) is not None]
        # float64: the float32 rounding of weighted sums would look like a spread.
        rewards = torch.tensor([reward for _, reward in scored], dtype=torch.float64)
        zscores = group_zscore(rewards, by_std=by_std, ddof=ddof, eps=eps)
        for sample in group.samples:
            sample.advantages = torch.zeros(sample.response_len, dtype=torch.float32)
        for (sample, _), zscore in zip(scored, zscores.tolist(), strict=True):
            sample.advantages = torch.full((sample.response_len,), zscore, dtype=torch.float32)
        samples.extend(group.samples)
    if normalize:
        whiten([sample for sample in samples if sample.reward is not None])
    return samples


def whiten(samples: Sequence[Sample], eps: float = 1e-8) -> None:
    """Shifts and scales the advantages to mean 0 and standard deviation 1 over all response tokens, in place.

    (a - mean) / sqrt(var + eps), var dividing by the number of tokens less one, as verl does; 0 where all are equal.
    """
    advantages = [sample.advantages for sample in samples if sample.advantages is not None]
    values = torch.cat(advantages).double() if advantages else torch.zeros(0, dtype=torch.float64)
    if values.numel() == 0:
        return
    mean = values.mean()
    has_spread = bool((values != values[0]).any())
    scale = torch.rsqrt(values.var() + eps) if has_spread else 0.0
    for values_R in advantages:
        values_R.copy_((values_R.double() - mean) * scale)


def _reward(sample: Sample) -> float | None:
    if sample.reward is not None and not math.isfinite(sample.reward):
        raise RewardError(
            f"sample {sample.index} of prompt {sample.prompt.id} has reward {sample.reward} from scores {sample.scores}; "
            "a reward function must return a finite number, or None for no reward"
        )
    return sample.reward
