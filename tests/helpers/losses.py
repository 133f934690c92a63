"""Compute losses and advantages from settings."""

from typing import Any

from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.algorithm.losses import policy_loss
from grpo_mega.config import AlgorithmConfig

SHORT = {
    "clip_low": "ratio_clip_eps_low",
    "clip_high": "ratio_clip_eps_high",
    "clip_c": "ratio_clip_c",
    "tau_positive": "sapo_tau_positive",
    "tau_negative": "sapo_tau_negative",
}
GRPO = AlgorithmConfig()


def loss_of(inputs: Any, **options: Any) -> Any:
    return policy_loss(
        inputs, AlgorithmConfig(**{SHORT.get(k, k): v for k, v in options.items()}, calculate_entropy=True)
    )


def assigned(groups: Any, algorithm: AlgorithmConfig = GRPO, kl_penalties: Any = None) -> Any:
    return assign_advantages(groups, algorithm, max_response_length=20, kl_penalties=kl_penalties)
