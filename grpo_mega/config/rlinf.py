"""RLinf's keys of the section `algorithm` with other names or values here: converted to our keys, or refused with our key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VALUES: Mapping[str, Mapping[str, str]] = {
    "kl_penalty_type": {"k1": "kl", "k2": "mse", "k3": "low_var_kl"},
    "adv_type": {"reinpp": "reinforce_plus_plus"},
}
# The bounds of log-ratios are defined in algorithm/inputs.py.
FIXED = {"clip_log_ratio_min": -20, "clip_log_ratio_max": 20, "recompute_logprobs": True, "shuffle_rollout": False}
ELSEWHERE = {
    "n_minibatches": "batch.mini_batches",
    "sampling_params": "rollout.temperature, top_p, top_k and max_response_length",
    "training_batch_size_per_gpu": "batch.tokens_per_micro_batch",
    "max_num_gen_batches": "algorithm.dynamic_sampling_tries",
}
_REPLACED = ("actor", "reinforce_plus_plus", 0)  # values that another of RLinf's keys refines


def to_ours(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with RLinf's keys replaced by ours. Raise ValueError for unsupported or contradicting keys."""
    for key, value in given.items():
        if key in ELSEWHERE:
            raise ValueError(f"algorithm.{key}={value}: is RLinf's name; set {ELSEWHERE[key]} instead")
        if value not in (None, FIXED.get(key, value)):
            raise ValueError(f"algorithm.{key}={value}: must be {str(FIXED[key]).lower()}, as it always is here; leave it out")
    meanings = {key: _meaning(key, value, given) for key, value in given.items()}
    ours = {key: value for key, value in given.items() if meanings[key] is None and key not in FIXED}
    for key, values in VALUES.items():
        if isinstance(ours.get(key), str):
            ours[key] = values.get(ours[key], ours[key])
    for key, meaning in meanings.items():
        for name, value in (meaning or {}).items():
            if ours.get(name) not in (None, value, *_REPLACED):
                raise ValueError(
                    f"algorithm.{key}: means algorithm.{name}={value}, which is {ours[name]}; leave one of them out"
                )
            ours[name] = value
    return ours


def _meaning(key: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return our keys for one of RLinf's, empty if it is off; None for one of our keys."""
    meanings = {
        "clip_ratio_low": {"ratio_clip_eps_low": value},
        "clip_ratio_high": {"ratio_clip_eps_high": value},
        "clip_ratio_c": {"loss_type": "dual_clip", "ratio_clip_c": value},
        "importance_sampling_fix": {
            "correction": {"importance": "token", "max_importance": given.get("importance_sampling_clip")}
        },
        "importance_sampling_clip": {},
        "reinpp_kl_beta": {"kl_beta": value, "kl_in": "reward"},
        "use_reinpp_baseline": {"adv_type": "reinforce_plus_plus_baseline"},
    }
    return meanings.get(key) if value else {} if key in meanings else None
