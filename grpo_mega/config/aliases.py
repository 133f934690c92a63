"""Names from elsewhere in the section `algorithm`: the published methods that `recipe` names, and RLinf's keys.

RLinf's keys with other names or values here are converted to our keys, or refused with our key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

# The papers' values, listed in algorithm/README.md. grpo is the section's defaults.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "grpo": {},
    "rlinf": {"loss_agg_func": "token-mean", "normalize_advantages": True, "early_stop_imp_ratio": 5.0},
    "deepseekmath": {"group_size": 64, "kl_beta": 0.04, "kl_clamp": None, "std_eps": 0.0},
    "open_r1": {"loss_agg_func": "token-mean", "kl_beta": 0.04, "kl_clamp": None, "std_eps": 1e-4},
    "ms_swift": {"group_size": 8, "kl_beta": 0.04, "std_eps": 1e-8},
    "dr_grpo": {"normalize_by_std": False, "loss_agg_func": "seq-mean-token-sum-norm"},
    "dapo": {
        "loss_agg_func": "token-mean",
        "ratio_clip_eps_high": 0.28,
        "dynamic_sampling_tries": 4,
        "overlong_buffer": 0.2,
    },
    "gspo": {"loss_type": "gspo", "ratio_clip_eps_low": 3e-4, "ratio_clip_eps_high": 4e-4},
    "gspo_token": {"loss_type": "gspo_token", "ratio_clip_eps_low": 3e-4, "ratio_clip_eps_high": 4e-4},
    "cispo": {
        "loss_type": "cispo",
        "loss_agg_func": "token-mean",
        "ratio_clip_eps_low": 1.0,
        "ratio_clip_eps_high": 4.0,
    },
    "sapo": {"loss_type": "sapo"},
    "gmpo": {"loss_type": "gmpo", "ratio_clip_eps": 0.4},
    "rloo": {"adv_type": "rloo", "loss_agg_func": "seq-mean-token-sum", "kl_in": "reward", "kl_penalty_type": "kl"},
    "reinforce_plus_plus": {
        "adv_type": "reinforce_plus_plus",
        "loss_agg_func": "token-mean",
        "kl_in": "reward",
        "kl_penalty_type": "kl",
    },
    "reinforce_plus_plus_baseline": {
        "adv_type": "reinforce_plus_plus_baseline",
        "loss_agg_func": "token-mean",
        "kl_penalty_type": "mse",
    },
    "process_supervision": {"adv_type": "grpo_process"},
    "mt_grpo": {"adv_type": "grpo_turn"},
    "opo": {"adv_type": "opo", "loss_agg_func": "seq-mean-token-sum"},
    "pass_at_k": {"adv_type": "pass_at_k"},
    "gdpo": {"adv_type": "gdpo"},
    "lite_ppo": {"std_over": "batch", "loss_agg_func": "token-mean"},
    "clip_cov": {"loss_type": "clip_cov", "loss_agg_func": "token-mean", "ratio_clip_eps": 1.0},
    "kl_cov": {"loss_type": "kl_cov", "loss_agg_func": "token-mean", "cov_share": 2e-3},
    "decoupled_ppo": {"correction": {"importance": "icepop", "mask_low": 0.0, "mask_high": 5.0}},
    "opd": {"adv_type": "none", "distill_beta": 1.0, "loss_agg_func": "token-mean"},
    "partial": {"correction": {"importance": "token"}},  # truncated importance of stale tokens, for rollout.partial
    "sft": {"positive_nll": 1.0},  # `grpo-mega sft` sets it; advantages are 0
}

if TYPE_CHECKING:
    Recipe = str  # a type checker cannot read the names from the table
else:
    Recipe = Literal[tuple(RECIPES)]

VALUES: Mapping[str, Mapping[str, str]] = {
    "kl_penalty_type": {"k1": "kl", "k2": "mse", "k3": "low_var_kl"},
    "adv_type": {"reinpp": "reinforce_plus_plus"},
}
# The bounds of log-ratios are defined in algorithm/inputs.py.
FIXED = {"clip_log_ratio_min": -20, "clip_log_ratio_max": 20, "recompute_logprobs": True, "shuffle_rollout": False}
ELSEWHERE = {
    "n_minibatches": "batch.mini_batches",
    "sampling_params": "rollout.temperature and max_response_length, without top_p and top_k, which bias the gradient,",
    "training_batch_size_per_gpu": "batch.tokens_per_micro_batch",
    "max_num_gen_batches": "algorithm.dynamic_sampling_tries",
}
_REPLACED = ("actor", "reinforce_plus_plus", 0)  # values that another of RLinf's keys refines


def from_rlinf(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with RLinf's keys replaced by ours. Raise ValueError for unsupported or contradicting keys."""
    for key, value in given.items():
        if key in ELSEWHERE:
            raise ValueError(f"algorithm.{key}={value}: is RLinf's name; set {ELSEWHERE[key]} instead")
        if value not in (None, FIXED.get(key, value)):
            raise ValueError(
                f"algorithm.{key}={value}: must be {str(FIXED[key]).lower()}, as it always is here; leave it out"
            )
    # Our keys for each of RLinf's.
    ours_for: dict[str, dict[str, Any]] = {
        "clip_ratio_low": {"ratio_clip_eps_low": given.get("clip_ratio_low")},
        "clip_ratio_high": {"ratio_clip_eps_high": given.get("clip_ratio_high")},
        "clip_ratio_c": {"loss_type": "dual_clip", "ratio_clip_c": given.get("clip_ratio_c")},
        "importance_sampling_fix": {
            "correction": {"importance": "token", "max_importance": given.get("importance_sampling_clip")}
        },
        "importance_sampling_clip": {},
        "reinpp_kl_beta": {"kl_beta": given.get("reinpp_kl_beta"), "kl_in": "reward"},
        "use_reinpp_baseline": {"adv_type": "reinforce_plus_plus_baseline"},
    }
    ours = {key: value for key, value in given.items() if key not in ours_for and key not in FIXED}
    for key, values in VALUES.items():
        if isinstance(ours.get(key), str):
            ours[key] = values.get(ours[key], ours[key])
    for key in [key for key, value in given.items() if value and key in ours_for]:  # the others are off
        for name, value in ours_for[key].items():
            if ours.get(name) not in (None, value, *_REPLACED):
                raise ValueError(
                    f"algorithm.{key}: means algorithm.{name}={value}, which is {ours[name]}; leave one of them out"
                )
            ours[name] = value
    return ours
