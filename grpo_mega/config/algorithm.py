"""The section `algorithm` of the config: RLinf's keys by their names, and those of the methods that came after GRPO.

`recipe` names a published method and sets its keys (RECIPES); a key that is given overrides the recipe's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_mega.config import rlinf
from grpo_mega.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section

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
]

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLPenalty = Literal["low_var_kl", "low_var_kl_weighted", "kl", "abs", "mse"]
KL_CLAMP = 10.0  # as in verl and RLinf: one token far from the reference must not decide the step

# Values of the papers, which algorithm/README.md lists; grpo is the section's own defaults.
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
}


class CorrectionConfig(Section):
    """Off-policy correction by the mismatch ratio exp(old_logprobs - rollout_logprobs); see algorithm/correction.py."""

    # Weight of the policy loss: the truncated ratio; icepop: the token's ratio within mask_low .. mask_high, and 0 outside.
    importance: Literal["none", "token", "sequence", "icepop"] = "none"
    max_importance: PositiveFloat = 2.0  # bound of the truncated ratio of token and sequence
    mask: Literal["none", "token", "sequence", "geometric"] = (
        "none"  # leave tokens (or responses) outside the bounds out of all losses
    )
    mask_low: PositiveFloat = 0.5  # defaults as in IcePop
    mask_high: PositiveFloat = 5.0
    veto_below: PositiveFloat | None = None  # leave out a response with a token of a smaller ratio

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        if not self.mask_low < self.mask_high:
            raise ValueError(
                f"algorithm.correction.mask_low={self.mask_low} is not below algorithm.correction.mask_high={self.mask_high}; "
                "lower it"
            )
        if self.importance == "icepop" and self.mask != "none":
            raise ValueError(
                f"algorithm.correction.mask={self.mask!r}: must be 'none' with algorithm.correction.importance='icepop', whose "
                "band is mask_low .. mask_high; leave mask out"
            )
        if self.importance == "icepop" and self.max_importance != 2.0:
            raise ValueError(
                f"algorithm.correction.max_importance={self.max_importance}: must not be set with "
                "algorithm.correction.importance='icepop', whose upper bound is mask_high; set mask_high"
            )
        return self


class AlgorithmConfig(Section):
    recipe: Recipe = "grpo"
    adv_type: Literal["grpo", "grpo_process", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] = "grpo"
    loss_type: Literal["actor", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "reinforce"] = "actor"
    loss_agg_func: Aggregation = "seq-mean-token-mean"
    group_size: Annotated[int, Field(ge=2)] = 16
    kl_beta: NonNegativeFloat = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_penalty_type: KLPenalty = "low_var_kl"
    kl_clamp: PositiveFloat | None = KL_CLAMP  # upper bound of low_var_kl (weighted or not) per token; None: none
    normalize_by_std: bool = True  # divide by the group's standard deviation; Dr. GRPO does not
    std_ddof: Literal[0, 1] = 1  # the deviation divides by group_size - std_ddof
    std_eps: NonNegativeFloat = 1e-6  # added to the deviation
    ratio_clip_eps: Annotated[float, Field(gt=0, le=1)] = 0.2  # gmpo: bound of the ratio's logarithm
    ratio_clip_eps_low: Annotated[float, Field(gt=0, le=1)] | None = None  # None: ratio_clip_eps
    ratio_clip_eps_high: PositiveFloat | None = None  # None: ratio_clip_eps
    ratio_clip_c: Annotated[float, Field(gt=1)] = 3.0  # dual_clip: upper bound of the ratio for negative advantages
    sapo_tau_positive: PositiveFloat = 1.0  # sapo: temperature of the gate for positive advantages
    sapo_tau_negative: PositiveFloat = 1.05  # and for negative ones
    calculate_entropy: bool = False
    entropy_bonus: float = 0.0
    normalize_advantages: bool = False  # whiten over all tokens of the rollout, after the group's normalisation
    early_stop_imp_ratio: PositiveFloat | None = None  # skip a mini-batch with a larger mean importance ratio
    use_valid_token_scale: bool = False  # divide by the valid tokens of the rollout, not of the mini-batch
    # DAPO dynamic sampling: replace zero-variance groups by up to so many extra rollouts per step.
    dynamic_sampling_tries: NonNegativeInt = 0
    overlong_buffer: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of max_response_length, at its end, that costs reward
    overlong_penalty: PositiveFloat = 1.0  # reward lost at the end of the buffer
    overlong_filter: bool = False  # leave responses cut off at max_response_length out of the loss
    correction: CorrectionConfig = CorrectionConfig()

    @property
    def clip_low(self) -> float:
        return self.ratio_clip_eps if self.ratio_clip_eps_low is None else self.ratio_clip_eps_low

    @property
    def clip_high(self) -> float:
        return self.ratio_clip_eps if self.ratio_clip_eps_high is None else self.ratio_clip_eps_high

    @property
    def has_kl_loss(self) -> bool:
        return self.kl_beta > 0 and self.kl_in == "loss"

    @property
    def has_kl_reward(self) -> bool:
        return self.kl_beta > 0 and self.kl_in == "reward"

    @model_validator(mode="before")
    @classmethod
    def _fill_recipe(cls, value: Any) -> Any:
        """Fill in the recipe's keys that are not given, by any name. An unknown recipe is left to the field's own check."""
        if isinstance(value, dict):
            value = rlinf.to_ours(value)
        if not isinstance(value, dict) or not isinstance(value.get("recipe"), str):
            return value
        return {**RECIPES.get(value["recipe"], {}), **value}

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        if self.entropy_bonus != 0.0 and not self.calculate_entropy:
            raise ValueError(
                f"algorithm.entropy_bonus={self.entropy_bonus} needs algorithm.calculate_entropy=true; set both or neither"
            )
        if self.kl_in == "reward" and self.adv_type == "grpo_process":
            raise ValueError(
                "algorithm.kl_in=reward: must be loss with algorithm.adv_type=grpo_process; use algorithm.kl_in=loss"
            )
        return self
