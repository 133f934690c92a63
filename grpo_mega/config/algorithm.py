"""The section `algorithm` of the config: RLinf's keys by their names, and those of the methods that came after GRPO.

`recipe` names a published method and sets its keys (RECIPES); a key that is given overrides the recipe's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_mega.config import rlinf
from grpo_mega.config.base import MAX_NUMBER, NonNegativeFloat, NonNegativeInt, Number, PositiveFloat, PositiveInt, Section

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

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLPenalty = Literal["low_var_kl", "low_var_kl_weighted", "low_var_kl+", "kl", "abs", "mse"]
Rejection = Literal[
    "none", "token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"
]
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


class CorrectionConfig(Section):
    """Off-policy correction by the mismatch ratio exp(old_logprobs - rollout_logprobs); see algorithm/correction.py."""

    # Weight of the policy loss: the truncated ratio; icepop: the token's ratio within mask_low .. mask_high, and 0 outside.
    importance: Literal["none", "token", "sequence", "icepop"] = "none"
    min_importance: NonNegativeFloat = 0.0  # bounds of the truncated ratio of token and sequence
    max_importance: PositiveFloat = 2.0
    batch_normalize: bool = False  # divide the weights by their mean over the mini-batch
    mask: Literal["none", "token", "sequence", "geometric"] = (
        "none"  # leave tokens (or responses) outside the bounds out of all losses
    )
    mask_low: NonNegativeFloat = 0.5  # defaults as in IcePop
    mask_high: PositiveFloat = 5.0
    reject: Rejection = "none"  # leave out tokens or responses with a divergence k2 or k3 above reject_above
    reject_above: PositiveFloat | None = None  # nats
    veto_below: PositiveFloat | None = None  # leave out a response with a token of a smaller ratio
    # Leave the policy loss of responses with negative advantages out that the policy has moved from by more nats per token.
    off_policy_threshold: PositiveFloat | None = None

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
        for problem in self._problems():
            raise ValueError(f"algorithm.correction.{problem}")
        return self

    def _problems(self) -> Iterator[str]:
        if self.min_importance and self.importance not in ("token", "sequence"):
            yield f"min_importance={self.min_importance} needs importance='token' or 'sequence'; set it, or leave it out"
        if self.min_importance > self.max_importance:
            yield f"min_importance={self.min_importance} is above max_importance={self.max_importance}; lower it"
        if self.batch_normalize and self.importance == "none":
            yield "batch_normalize=true needs an importance other than 'none', whose weights it divides; set one"
        if self.reject != "none" and self.reject_above is None:
            yield f"reject={self.reject!r} needs algorithm.correction.reject_above, its bound; set it, for example to 0.5"
        if self.reject == "none" and self.reject_above is not None:
            yield f"reject_above={self.reject_above} needs algorithm.correction.reject; set it, for example to seq_max_k3"


class AlgorithmConfig(Section):
    recipe: Recipe = "grpo"
    adv_type: Literal[
        "grpo",
        "grpo_process",
        "grpo_turn",
        "grpo_leave_one_out",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "opo",
        "pass_at_k",
        "gdpo",
        "none",
    ] = "grpo"  # none: 0, for distillation alone
    loss_type: Literal[
        "actor", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "reinforce", "clip_cov", "kl_cov"
    ] = "actor"
    loss_agg_func: Aggregation = "seq-mean-token-mean"
    group_size: Annotated[int, Field(ge=2, le=100_000)] = 16
    kl_beta: NonNegativeFloat = 0.0
    kl_in: Literal["loss", "reward"] = "loss"
    kl_penalty_type: KLPenalty = "low_var_kl"
    kl_clamp: PositiveFloat | None = KL_CLAMP  # upper bound of low_var_kl (in any form) and of kl/mean per token; None: none
    # Adapt kl_beta after each step so that kl/mean gets near this (nats per token), by at most 0.2 / kl_horizon per sample.
    kl_target: PositiveFloat | None = None
    kl_horizon: PositiveFloat = 10000.0
    # Every so many steps the reference becomes alpha * policy + (1 - alpha) * reference, and an iteration ends; None: never.
    ref_model_sync_steps: PositiveInt | None = None
    ref_model_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1: the policy itself
    normalize_by_std: bool = True  # divide by the group's standard deviation; Dr. GRPO does not
    std_over: Literal["group", "batch"] = "group"  # batch: the deviation of all rewards of the step
    std_ddof: Annotated[int, Field(ge=0, le=1)] = 1  # the deviation divides by group_size - std_ddof
    std_eps: NonNegativeFloat = 1e-6  # added to the deviation
    ratio_clip_eps: Annotated[float, Field(gt=0, le=1)] = 0.2  # gmpo: bound of the ratio's logarithm
    ratio_clip_eps_low: Annotated[float, Field(gt=0, le=1)] | None = None  # None: ratio_clip_eps
    ratio_clip_eps_high: PositiveFloat | None = None  # None: ratio_clip_eps
    ratio_clip_c: Annotated[float, Field(gt=1, le=MAX_NUMBER)] = (
        3.0  # dual_clip: upper bound of the ratio for negative advantages
    )
    sapo_tau_positive: PositiveFloat = 1.0  # sapo: temperature of the gate for positive advantages
    sapo_tau_negative: PositiveFloat = 1.05  # and for negative ones
    cov_share: Annotated[float, Field(gt=0, le=1)] = 2e-4  # clip_cov, kl_cov: largest share of tokens that they treat apart
    cov_low: Number = 1.0  # clip_cov: these tokens have a covariance between both
    cov_high: Number = 5.0
    cov_kl: PositiveFloat = 1.0  # kl_cov: weight of the penalty
    pass_k: Annotated[int, Field(ge=2, le=100_000)] | None = None  # pass_at_k: k; None: group_size
    positive_nll: NonNegativeFloat = 0.0  # weight of the negative log-likelihood of right answers
    positive_above: Number = 0.0  # the reward above which a response is a right answer
    # A teacher's part of the advantage of a token, -distill_beta (log p_policy - log p_teacher); needs `teachers`.
    distill_beta: NonNegativeFloat = 0.0
    # sampled: that; reverse, forward: in the loss, the KL(policy || teacher) or KL(teacher || policy) over the vocabulary.
    distill_kl: Literal["sampled", "reverse", "forward"] = "sampled"
    calculate_entropy: bool = False
    entropy_bonus: Number = 0.0
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

    @property
    def averages_reference(self) -> bool:
        """True if the reference is a moving average of policies, kept in fp32."""
        return self.ref_model_sync_steps is not None and self.ref_model_mixup_alpha < 1

    def saved_reference_bytes(self, itemsize: int) -> int:
        """Return the bytes in a checkpoint of an element of the reference, whose weights have `itemsize`; 0: not saved."""
        return 0 if self.ref_model_sync_steps is None else 4 if self.averages_reference else itemsize

    def ends_iteration(self, step: int) -> bool:
        """Return True if the reference is refreshed after `step` steps."""
        return self.ref_model_sync_steps is not None and step % self.ref_model_sync_steps == 0

    @property
    def has_vocab_kl(self) -> bool:
        return self.distill_beta > 0 and self.distill_kl != "sampled"

    @property
    def is_by_covariance(self) -> bool:
        return self.loss_type in ("clip_cov", "kl_cov")

    @property
    def needs_mini_batch(self) -> bool:
        """True if the loss takes values from the log-probs of all tokens of the mini-batch."""
        return self.is_by_covariance or self.correction.batch_normalize

    @model_validator(mode="before")
    @classmethod
    def _fill_recipe(cls, value: Any) -> Any:
        """Fill in the recipe's keys that are not given, by any name. An unknown recipe is left to the field's own check."""
        if isinstance(value, dict):
            value = rlinf.to_ours(value)
        if not isinstance(value, dict) or not isinstance(value.get("recipe"), str):
            return value
        recipe = RECIPES.get(value["recipe"], {})
        inner = {name: {**recipe[name], **value[name]} for name in recipe if isinstance(value.get(name), dict)}
        return {**recipe, **value, **inner}

    @model_validator(mode="after")
    def _check(self) -> AlgorithmConfig:
        if self.entropy_bonus != 0.0 and not self.calculate_entropy:
            raise ValueError(
                f"algorithm.entropy_bonus={self.entropy_bonus} needs algorithm.calculate_entropy=true; set both or neither"
            )
        for problem in self._problems():
            raise ValueError(f"algorithm.{problem}")
        return self

    def _problems(self) -> Iterator[str]:
        adv_type = f"algorithm.adv_type={self.adv_type}"
        if self.kl_in == "reward" and self.adv_type in ("grpo_process", "grpo_turn", "gdpo"):
            yield f"kl_in=reward: must be loss with {adv_type}; use algorithm.kl_in=loss"
        if self.kl_target is not None and self.kl_beta == 0:
            yield f"kl_target={self.kl_target} needs algorithm.kl_beta > 0, the weight to begin with; set both or neither"
        if self.ref_model_sync_steps is not None and self.kl_beta == 0:
            yield f"ref_model_sync_steps={self.ref_model_sync_steps} needs algorithm.kl_beta > 0, or there is no reference"
        if self.ref_model_mixup_alpha != 1 and self.ref_model_sync_steps is None:
            yield f"ref_model_mixup_alpha={self.ref_model_mixup_alpha} needs algorithm.ref_model_sync_steps; set it"
        if self.std_over == "batch" and (self.adv_type != "grpo" or not self.normalize_by_std):
            yield "std_over=batch needs algorithm.adv_type=grpo and normalize_by_std=true; use group"
        if self.adv_type == "grpo_leave_one_out" and self.group_size < 3:
            yield f"group_size={self.group_size}: must be at least 3 with {adv_type}, for a deviation of the others; raise it"
        if self.adv_type == "gdpo" and self.overlong_buffer:
            yield f"overlong_buffer={self.overlong_buffer}: must be 0 with {adv_type}; punish length by a reward function"
        if self.pass_k is not None and self.adv_type != "pass_at_k":
            yield f"pass_k={self.pass_k} needs algorithm.adv_type=pass_at_k; set it, or leave pass_k out"
        if self.pass_k is not None and self.pass_k > self.group_size:
            yield f"pass_k={self.pass_k} is above algorithm.group_size={self.group_size}; lower it"
        if not self.is_by_covariance and self.cov_share != 2e-4:
            yield f"cov_share={self.cov_share} needs algorithm.loss_type=clip_cov or kl_cov; set it, or leave cov_share out"
        if self.loss_type != "clip_cov" and (self.cov_low, self.cov_high) != (1.0, 5.0):
            yield "cov_low and cov_high need algorithm.loss_type=clip_cov; set it, or leave them out"
        if self.loss_type != "kl_cov" and self.cov_kl != 1.0:
            yield f"cov_kl={self.cov_kl} needs algorithm.loss_type=kl_cov; set it, or leave cov_kl out"
        if not self.cov_low < self.cov_high:
            yield f"cov_low={self.cov_low} is not below algorithm.cov_high={self.cov_high}; lower it"
        yield from self._distillation_problems()
        if self.positive_above and not self.positive_nll:
            yield f"positive_above={self.positive_above} needs algorithm.positive_nll > 0; set it, for example to 0.1"

    def _distillation_problems(self) -> Iterator[str]:
        beta = f"algorithm.distill_beta={self.distill_beta}"
        if self.distill_beta and self.dynamic_sampling_tries:
            yield f"dynamic_sampling_tries={self.dynamic_sampling_tries}: must be 0 with {beta}, which uses every group; use 0"
        if self.distill_beta and self.is_by_covariance:
            yield f"loss_type={self.loss_type}: must not choose tokens by covariance with {beta}; use actor"
