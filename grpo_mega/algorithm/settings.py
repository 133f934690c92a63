"""From a config's section `algorithm` to what the pure functions of grpo_mega.algorithm take, which know no config."""

from __future__ import annotations

from grpo_mega.algorithm.advantages import AdvantageSettings, Overlong
from grpo_mega.algorithm.correction import CorrectionSettings
from grpo_mega.algorithm.losses import LossSettings
from grpo_mega.algorithm.objectives import Limits
from grpo_mega.config import AlgorithmConfig, Config


def loss_settings(a: AlgorithmConfig) -> LossSettings:
    """Of the policy's loss. A KL penalty in the reward is none in the loss."""
    return LossSettings(
        loss_type=a.loss_type,
        limits=Limits(a.clip_low, a.clip_high, a.ratio_clip_c, a.sapo_tau_positive, a.sapo_tau_negative),
        kl_beta=a.kl_beta if a.has_kl_loss else 0.0,
        kl_penalty_type=a.kl_penalty_type,
        kl_clamp=a.kl_clamp,
        entropy_bonus=a.entropy_bonus,
        correction=CorrectionSettings(**a.correction.model_dump()),
    )


def advantage_settings(config: Config) -> AdvantageSettings:
    """Of the advantages of a step's samples."""
    a, longest = config.algorithm, config.rollout.max_response_length
    return AdvantageSettings(
        adv_type=a.adv_type,
        by_std=a.normalize_by_std,
        ddof=a.std_ddof,
        eps=a.std_eps,
        normalize=a.normalize_advantages,
        kl_beta=a.kl_beta if a.has_kl_reward else 0.0,
        overlong=Overlong(longest, round(a.overlong_buffer * longest), a.overlong_penalty),
    )
