"""The published methods that `algorithm.recipe` names, and the keys that each method sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Recipe = Literal[
    "grpo",
    "rlinf",
    "deepseekmath",
    "open_r1",
    "ms_swift",
    "dr_grpo",
    "dapo",
    "gspo",
    "gspo_token",
    "cispo",
    "sapo",
    "gmpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "process_supervision",
    "mt_grpo",
    "opo",
    "pass_at_k",
    "gdpo",
    "lite_ppo",
    "clip_cov",
    "kl_cov",
    "decoupled_ppo",
    "opd",
    "partial",
]

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
    "cispo": {"loss_type": "cispo", "loss_agg_func": "token-mean", "ratio_clip_eps_low": 1.0, "ratio_clip_eps_high": 4.0},
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
    "partial": {"correction": {"importance": "token"}},  # truncated importance of stale tokens, for rollout.partial
    "opd": {"adv_type": "none", "distill_beta": 1.0, "loss_agg_func": "token-mean"},
}
