"""The names that TRL and verl give to the same metrics; Weights & Biases gets them beside ours.

Only metrics of equal meaning have an alias. Different, and therefore left out: TRL's num_tokens (of the whole run), verl's
perf/throughput (which counts prompts too) and actor/pg_clipfrac_lower (of dual clipping). timing_s has our phases, by verl's
names where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_mega.types import StepMetrics

SAME: dict[str, tuple[str, ...]] = {  # ours -> TRL's (1.16), verl's
    "reward/mean": ("reward", "critic/score/mean", "critic/rewards/mean"),
    "reward/std": ("reward_std",),
    "reward/min": ("critic/score/min", "critic/rewards/min"),
    "reward/max": ("critic/score/max", "critic/rewards/max"),
    "groups/zero_variance": ("frac_reward_zero_std",),
    "kl/mean": ("kl", "actor/kl_loss"),
    "entropy/mean": ("entropy", "actor/entropy"),
    "loss/total": ("loss",),
    "loss/policy": ("policy_loss", "actor/pg_loss"),
    "grad_norm": ("grad_norm", "actor/grad_norm"),
    "lr": ("learning_rate", "actor/lr"),
    "response_length/mean": ("completions/mean_length", "response_length/mean"),
    "response_length/min": ("completions/min_length", "response_length/min"),
    "response_length/max": ("completions/max_length", "response_length/max"),
    "response_length/cut": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "clip/fraction": ("clip_ratio/region_mean", "actor/pg_clipfrac"),
    "clip/fraction_low": ("clip_ratio/low_mean",),
    "clip/fraction_high": ("clip_ratio/high_mean",),
    "mismatch/abs_mean": ("sampling/sampling_logp_difference/mean",),
    "mismatch/abs_max": ("sampling/sampling_logp_difference/max",),
    "seconds/step": ("step_time", "timing_s/step", "perf/time_per_step"),
}
PHASES = {
    "sample": "gen",
    "update": "update_actor",
    "sync": "update_weights",
    "checkpoint": "save_checkpoint",
    "evaluation": "testing",
}
_OF_ALL = {"mean", "std", "min", "max"}


def other_names(metrics: Mapping[str, float]) -> StepMetrics:
    """Return the metrics that TRL or verl have too, under their names."""
    aliases: StepMetrics = {}
    for name, value in metrics.items():
        family, _, rest = name.partition("/")
        if name in SAME:
            aliases |= dict.fromkeys(SAME[name], value)
        elif family == "reward" and rest not in _OF_ALL:
            aliases[f"rewards/{rest}/mean"] = value
        elif family == "seconds":
            aliases[f"timing_s/{PHASES.get(rest, rest)}"] = value
        elif family == "eval" and (rest == "score" or rest.endswith("/score")):
            aliases[f"val-core/{rest.removesuffix('/score') if '/' in rest else 'heldout'}/score/mean@1"] = value
    return {name: value for name, value in aliases.items() if name not in metrics}
