"""Which keys of the section `algorithm` each method reads, as one table. A run warns of keys that it never reads.

Rules of AlgorithmConfig refuse some more keys of this kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce

from grpo_mega.config.algorithm import STEPWISE, AlgorithmConfig

# Keys, the key that decides whether they are read, the condition for that, and a remedy.
_READ_IF: tuple[tuple[str, str, Callable[[AlgorithmConfig], object], str], ...] = (
    (
        "normalize_by_std std_ddof std_eps",
        "adv_type",
        lambda a: a.adv_type in (*STEPWISE, "grpo", "grpo_leave_one_out", "pass_at_k", "gdpo"),
        "use grpo, grpo_leave_one_out, pass_at_k or gdpo",
    ),
    ("std_ddof std_eps", "normalize_by_std", lambda a: a.normalize_by_std or a.adv_type == "gdpo", "set it to true"),
    (
        "normalize_advantages",
        "adv_type",
        lambda a: not a.adv_type.startswith("reinforce_plus_plus"),
        "it always whitens advantages, so use another one",
    ),
    ("overlong_buffer", "adv_type", lambda a: a.adv_type != "none", "use one that reads rewards"),
    ("overlong_penalty", "overlong_buffer", lambda a: a.overlong_buffer, "set it, for example to 0.2"),
    (
        "ratio_clip_eps ratio_clip_eps_low ratio_clip_eps_high",
        "loss_type",
        lambda a: a.loss_type not in ("reinforce", "kl_cov"),
        "use one that clips, such as actor",
    ),
    (
        "ratio_clip_eps",
        "ratio_clip_eps_low",
        lambda a: None in (a.ratio_clip_eps_low, a.ratio_clip_eps_high),
        "set ratio_clip_eps_low and ratio_clip_eps_high instead",
    ),
    ("ratio_clip_c", "loss_type", lambda a: a.loss_type == "dual_clip", "use dual_clip"),
    ("sapo_tau_positive sapo_tau_negative", "loss_type", lambda a: a.loss_type == "sapo", "use sapo"),
    ("use_valid_token_scale", "loss_agg_func", lambda a: a.loss_agg_func == "token-mean", "use token-mean"),
    ("kl_in kl_penalty_type kl_clamp", "kl_beta", lambda a: a.kl_beta, "raise it, for example to 0.01"),
    ("kl_horizon", "kl_target", lambda a: a.kl_target, "set it"),
    ("distill_kl", "distill_beta", lambda a: a.distill_beta, "raise it, and set teachers"),
    (
        "correction.max_importance",
        "correction.importance",
        lambda a: a.correction.importance != "none",
        "use token or sequence",
    ),
    (
        "correction.mask_low correction.mask_high",
        "correction.mask",
        lambda a: a.correction.mask != "none" or a.correction.importance == "icepop",
        "use token, sequence or geometric, or correction.importance=icepop",
    ),
)


def unread_keys(a: AlgorithmConfig) -> Iterator[str]:
    """Yield a line for each key that differs from its default and from the recipe's value although nothing reads it."""
    defaults, of_recipe = AlgorithmConfig(), AlgorithmConfig(recipe=a.recipe)
    for keys, decisive, is_read, remedy in _READ_IF:
        for key in keys.split() if not is_read(a) else ():
            value = _value(a, key)
            if value not in (_value(defaults, key), _value(of_recipe, key)):
                shown = "true" if value is True else "false" if value is False else value
                yield (
                    f"algorithm.{key}={shown} does nothing with algorithm.{decisive}={_value(a, decisive)}; {remedy},"
                    f" or leave {key} out"
                )


def _value(a: AlgorithmConfig, key: str) -> object:
    return reduce(getattr, key.split("."), a)
