"""Advantages from rewards: one estimator for each adv_type, pure functions of a group's samples.

In: a step's groups, scored. Out: the same samples with `advantages` set to one float32 value per response token. All finite:
groups without spread, groups of one sample and samples without a reward give exactly 0 (reinforce_plus_plus, which has no group
baseline, excepted: there only samples without a reward do, and rollouts without spread).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_mega.errors import RewardError
from grpo_mega.types import Group, Sample


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), in tokens; a buffer of 0 is none."""

    max_response_length: int = 0
    buffer: int = 0
    penalty: float = 1.0

    def reward(self, length: int) -> float:
        """0 up to max_response_length - buffer, from there down to -penalty at max_response_length."""
        if self.buffer == 0:
            return 0.0
        excess = length - (self.max_response_length - self.buffer)
        return -self.penalty * min(max(excess / self.buffer, 0.0), 1.0)


@dataclass(frozen=True)
class AdvantageSettings:
    """The names are those of a config's section `algorithm`."""

    adv_type: str = "grpo"  # of ADVANTAGES
    by_std: bool = True
    ddof: int = 1
    eps: float = 1e-6
    normalize: bool = False  # whiten over all tokens of the step
    kl_beta: float = 0.0  # of the penalty in the reward
    overlong: Overlong = field(default_factory=Overlong)


def assign(
    groups: Iterable[Group], settings: AdvantageSettings | None = None, penalties: Sequence[Tensor] | None = None
) -> list[Sample]:
    """Sets every sample's advantages by settings.adv_type, and returns the samples, flat and in order.

    Samples without a reward get zeros and count in no mean. `penalties` are the per-token KL penalties ([response_len] each, in
    the order of the samples) of which kl_beta is taken from the reward; without them, none is. `groups` must be all groups of
    the step, not one rank's. Raises RewardError for a reward that is not finite.
    """
    settings = settings or AdvantageSettings()
    samples: list[Sample] = []
    for group in groups:
        kls = penalties[len(samples) :] if penalties is not None else [torch.zeros(s.response_len) for s in group.samples]
        scored = [
            (s, settings.kl_beta * kl.double()) for s, kl in zip(group.samples, kls, strict=False) if _counts(s, settings)
        ]
        for sample in group.samples:
            sample.advantages = torch.zeros(sample.response_len, dtype=torch.float64)
        values = ADVANTAGES[settings.adv_type]([s for s, _ in scored], [kl for _, kl in scored], settings)
        for (sample, _), values_R in zip(scored, values, strict=True):
            sample.advantages = values_R.contiguous()
        samples.extend(group.samples)
    if settings.normalize or settings.adv_type in _WHITENED:
        whiten([sample for sample in samples if _counts(sample, settings)])
    for sample in samples:  # only now: of advantages that differ by little, whitening would show float32's rounding
        assert sample.advantages is not None
        sample.advantages = sample.advantages.float()
    return samples


def grpo(samples: Sequence[Sample], kls: Sequence[Tensor], settings: AdvantageSettings) -> list[Tensor]:
    """Outcome supervision, DeepSeekMath (arXiv 2402.03300) 4.1.2: a response's z-score in its group, on all its tokens."""
    return _on_all_tokens(samples, _zscore(_rewards(samples, kls, settings), settings))


def grpo_process(samples: Sequence[Sample], kls: Sequence[Tensor], settings: AdvantageSettings) -> list[Tensor]:
    """Process supervision, DeepSeekMath (arXiv 2402.03300) 4.1.3: step rewards are normalised over all steps of all outputs of
    the group; a token's advantage is the sum of those of the steps that end at or after it, 0 after the last step.

    Where there is also a reward for the whole response, its z-score (as in `grpo`) is added on all tokens. Where no sample of
    the group has one, the overlong punishment alone is that reward.
    """
    steps = _zscore(torch.tensor([r for s in samples for r in s.step_rewards], dtype=torch.float64), settings)
    of_samples = steps.split([len(s.step_rewards) for s in samples]) if samples else []
    has_outcome = any(s.reward is not None for s in samples)
    whole = [i for i, s in enumerate(samples) if s.reward is not None or not has_outcome]
    outcome = _zscore(_rewards([samples[i] for i in whole], [kls[i] for i in whole], settings), settings)
    result = [_sum_of_later(s.step_ends, values, s.response_len) for s, values in zip(samples, of_samples, strict=True)]
    for i, zscore in zip(whole, outcome, strict=True):
        result[i] = result[i] + zscore
    return result


def rloo(samples: Sequence[Sample], kls: Sequence[Tensor], settings: AdvantageSettings) -> list[Tensor]:
    """Leave one out (Kool et al. 2019; RLOO, arXiv 2402.14740, eq. 8): r_i less the mean of the group's other rewards."""
    rewards = _rewards(samples, kls, settings)
    return _on_all_tokens(samples, _centered(rewards) * (len(rewards) / max(len(rewards) - 1, 1)))


def reinforce_plus_plus(samples: Sequence[Sample], kls: Sequence[Tensor], settings: AdvantageSettings) -> list[Tensor]:
    """REINFORCE++ (arXiv 2501.03262, eqs. 5 and 6): r less the KL penalties of the token and of those after it.

    No group takes part; the step's tokens are whitened together afterwards.
    """
    outcome = _rewards(samples, [torch.zeros_like(kl) for kl in kls], settings)
    return [r - kl.flip(0).cumsum(0).flip(0) for r, kl in zip(outcome, kls, strict=True)]


def reinforce_plus_plus_baseline(samples: Sequence[Sample], kls: Sequence[Tensor], settings: AdvantageSettings) -> list[Tensor]:
    """REINFORCE++ with the group's mean as its baseline (arXiv 2501.03262, eq. 7); all tokens are whitened afterwards."""
    return _on_all_tokens(samples, _centered(_rewards(samples, kls, settings)))


# (a group's scored samples, kl_beta KL of their tokens, settings) -> float64 advantages of their tokens. Under the names by
# which a config asks for them (algorithm.adv_type).
Estimator = Callable[[Sequence[Sample], Sequence[Tensor], AdvantageSettings], list[Tensor]]
ADVANTAGES: Mapping[str, Estimator] = {
    f.__name__: f for f in (grpo, grpo_process, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline)
}
_WHITENED = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}


def group_zscore(rewards: Tensor, *, by_std: bool = True, ddof: int = 1, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) over the [G] rewards of one group; 0 where all are equal, or where there is only one.

    std divides by G - ddof: 1 is what slime, verl, RLinf and TRL use, 0 what Megatron-LM uses. Not `by_std`: r - mean, which
    gives easy and hard prompts no more weight than others (Dr. GRPO, arXiv 2503.20783, section 3.1).
    """
    centered = _centered(rewards)
    if not by_std or not bool(centered.any()):
        return centered
    std = (centered.square().sum() / (rewards.numel() - ddof)).sqrt()
    return centered / (std + eps)


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


def _rewards(samples: Sequence[Sample], kls: Sequence[Tensor], settings: AdvantageSettings) -> Tensor:
    """[G] float64 (float32's rounding of weighted sums would look like a spread): reward + overlong - sum of the KL."""
    rewards = [
        (s.reward or 0.0) + settings.overlong.reward(s.response_len) - float(kl.sum())
        for s, kl in zip(samples, kls, strict=True)
    ]
    return torch.tensor(rewards, dtype=torch.float64)


def _zscore(rewards: Tensor, settings: AdvantageSettings) -> Tensor:
    return group_zscore(rewards, by_std=settings.by_std, ddof=settings.ddof, eps=settings.eps)


def _centered(rewards: Tensor) -> Tensor:
    """r - mean. Equal rewards are compared exactly: their mean may differ by one rounding, which std + eps would blow up."""
    if rewards.numel() == 0 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def _on_all_tokens(samples: Sequence[Sample], values: Tensor) -> list[Tensor]:
    return [value.expand(s.response_len) for s, value in zip(samples, values, strict=True)]


def _sum_of_later(ends: Sequence[int], values: Tensor, length: int) -> Tensor:
    """[length] float64: for each token the sum of `values` of the steps whose end is not before it."""
    at_ends = torch.zeros(length, dtype=torch.float64).index_add(0, torch.tensor(ends, dtype=torch.int64), values)
    return at_ends.flip(0).cumsum(0).flip(0)


def _counts(sample: Sample, settings: AdvantageSettings) -> bool:
    if any(not math.isfinite(r) for r in [*sample.step_rewards, sample.reward or 0.0]):
        raise RewardError(
            f"sample {sample.index} of prompt {sample.prompt.id} has reward {sample.reward} and step rewards "
            f"{sample.step_rewards} from scores {sample.scores}; a reward function must return finite numbers, or None for none"
        )
    return sample.is_scored if settings.adv_type == "grpo_process" else sample.reward is not None
