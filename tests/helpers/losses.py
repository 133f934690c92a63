"""A loss by its settings as keyword arguments."""

from grpo_mega.algorithm.correction import CorrectionSettings
from grpo_mega.algorithm.losses import LossSettings, policy_loss
from grpo_mega.algorithm.objectives import Limits

LIMITS = ("clip_low", "clip_high", "clip_c", "tau_positive", "tau_negative")


def loss_of(inputs, *, correction=None, **options):
    limits = Limits(**{name: options.pop(name) for name in LIMITS if name in options})
    settings = LossSettings(limits=limits, correction=CorrectionSettings(**(correction or {})), **options)
    return policy_loss(inputs, settings)
