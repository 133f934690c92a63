"""The section `algorithm` of the config: RLinf's keys under their names, and keys for methods after GRPO.

`recipe` names a published method and sets its keys (aliases.py). A key that is given overrides the recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_mega.config.aliases import RECIPES, Recipe, from_rlinf
from grpo_mega.config.base import (
    MAX_NUMBER,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Section,
    free,
    ruled,
)

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLPenalty = Literal["low_var_kl", "low_var_kl_weighted", "low_var_kl+", "kl", "abs", "mse"]
Rejection = Literal[
    "none", "token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"
]
# verl and RLinf use the same value. One token far from the reference must not decide the step.
KL_CLAMP = 10.0
STEPWISE = ("grpo_process", "grpo_turn")  # values of adv_type that read rewards of steps and turns

# Rules of several keys.
_STD = "algorithm.adv_type=grpo|grpo_process|grpo_turn|grpo_leave_one_out|pass_at_k|gdpo"
_BY_STD = "algorithm.normalize_by_std=true or algorithm.adv_type=gdpo"
_CLIPS = "algorithm.loss_type!=reinforce|kl_cov, which clip nothing"


class CorrectionConfig(Section):
    """Off-policy correction by the mismatch ratio exp(old_logprobs - rollout_logprobs); see token_weights.py."""

    importance: Literal["none", "token", "sequence", "icepop"] = Field(
        default="none",
        description=(
            "Weight of the policy loss. token and sequence use the truncated mismatch ratio, icepop uses a "
            "token's ratio inside mask_low .. mask_high and 0 outside."
        ),
    )
    min_importance: NonNegativeFloat = ruled(
        needs="algorithm.correction.importance=token|sequence",
        at_most="algorithm.correction.max_importance",
        default=0.0,
        description="Lower bound of the truncated ratio with importance=token or sequence.",
    )
    max_importance: PositiveFloat = ruled(
        used_with="algorithm.correction.importance",
        excludes="algorithm.correction.importance=icepop, whose upper bound is mask_high; set mask_high",
        default=2.0,
        description="Upper bound of the truncated ratio with importance=token or sequence.",
    )
    batch_normalize: bool = ruled(
        needs="algorithm.correction.importance, whose weights it divides",
        default=False,
        description="Divide the importance weights by their mean over the mini-batch.",
    )
    mask: Literal["none", "token", "sequence", "geometric"] = ruled(
        excludes="algorithm.correction.importance=icepop, whose band is mask_low .. mask_high; leave mask out",
        default="none",
        description="Exclude tokens, or whole responses, with a ratio outside mask_low .. mask_high from all losses.",
    )
    mask_low: NonNegativeFloat = ruled(
        used_with="algorithm.correction.mask or algorithm.correction.importance=icepop",
        below="algorithm.correction.mask_high",
        default=0.5,
        description="Lower bound of the ratio for mask and importance=icepop. The default is that of IcePop.",
    )
    mask_high: PositiveFloat = ruled(
        used_with="algorithm.correction.mask or algorithm.correction.importance=icepop",
        default=5.0,
        description="Upper bound of the ratio for mask and importance=icepop. The default is that of IcePop.",
    )
    reject: Rejection = ruled(
        needs="algorithm.correction.reject_above, its bound; set it, for example to 0.5",
        default="none",
        description="Exclude tokens, or whole responses, whose divergence (k2 or k3) exceeds reject_above.",
    )
    reject_above: PositiveFloat | None = ruled(
        needs="algorithm.correction.reject; set it, for example to seq_max_k3",
        default=None,
        description="Largest divergence that reject accepts, in nats. Needs reject.",
    )
    veto_below: PositiveFloat | None = Field(
        default=None, description="Exclude a response if one of its tokens has a smaller ratio. None excludes none."
    )
    off_policy_threshold: PositiveFloat | None = Field(
        default=None,
        description=(
            "Mask negative-advantage responses whose mean log-prob has dropped by more than this many nats per "
            "token since the rollout. None masks none."
        ),
    )


class AlgorithmConfig(Section):
    recipe: Recipe = Field(
        default="grpo",
        description=(
            "Published method whose values are the defaults of this section. A key that is given overrides the recipe."
        ),
    )
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
    ] = Field(default="grpo", description="Advantage estimator. none sets advantages to 0, for distillation alone.")
    loss_type: Literal[
        "actor", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "gmpo", "reinforce", "clip_cov", "kl_cov"
    ] = Field(default="actor", description="Policy loss. actor is the clipped loss of PPO.")
    loss_agg_func: Aggregation = Field(
        default="seq-mean-token-mean",
        description="How the loss of tokens is averaged over sequences and the mini-batch.",
    )
    group_size: Annotated[int, Field(ge=2, le=100_000)] = Field(default=16, description="Number of samples per prompt.")
    kl_beta: NonNegativeFloat = free(
        default=0.0, description="Weight of the KL penalty against the reference. 0 needs no reference."
    )
    kl_in: Literal["loss", "reward"] = ruled(
        used_with="algorithm.kl_beta>0; set it, for example to 0.01",
        excludes="algorithm.adv_type=grpo_process|grpo_turn|gdpo; use kl_in=loss",
        default="loss",
        description="Where the KL penalty is applied: added to the loss, or subtracted from the reward.",
    )
    kl_penalty_type: KLPenalty = ruled(
        used_with="algorithm.kl_beta>0; set it, for example to 0.01",
        default="low_var_kl",
        description="Estimator of the KL divergence per token. low_var_kl is k3.",
    )
    kl_clamp: PositiveFloat | None = free(
        used_with="algorithm.kl_beta>0; set it, for example to 0.01",
        default=KL_CLAMP,
        description="Upper bound per token of low_var_kl and kl/mean, in nats. None sets no bound.",
    )
    kl_target: PositiveFloat | None = free(
        needs="algorithm.kl_beta>0, the initial weight",
        default=None,
        description=(
            "Adapt kl_beta after each step so that kl/mean approaches this value, in nats per token. None keeps "
            "kl_beta."
        ),
    )
    kl_horizon: PositiveFloat = free(
        used_with="algorithm.kl_target",
        default=10000.0,
        description="Number of samples that sets how fast kl_beta adapts: by at most 0.2 / kl_horizon per sample.",
    )
    ref_model_sync_steps: PositiveInt | None = ruled(
        needs="algorithm.kl_beta>0, or there is no reference",
        excludes=("model.lora, whose reference is the base", "precision.fp8_parameters"),
        default=None,
        description="Update the reference from the policy every this many steps. None never updates it.",
    )
    ref_model_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = ruled(
        needs="algorithm.ref_model_sync_steps",
        default=1.0,
        description="Weight of the policy in an updated reference: alpha * policy + (1 - alpha) * reference.",
    )
    normalize_by_std: bool = ruled(
        used_with=_STD,
        default=True,
        description="Divide advantages by the standard deviation of rewards. Dr. GRPO does not.",
    )
    std_over: Literal["group", "batch"] = ruled(
        needs=("algorithm.adv_type=grpo; use group", "algorithm.normalize_by_std=true; use group"),
        default="group",
        description="Rewards in the standard deviation: of the group, or of the batch, which is the whole step.",
    )
    std_ddof: Annotated[int, Field(ge=0, le=1)] = ruled(
        used_with=(_STD, _BY_STD),
        default=1,
        description="Delta degrees of freedom: the variance divides by group_size - std_ddof.",
    )
    std_eps: NonNegativeFloat = ruled(
        used_with=(_STD, _BY_STD), default=1e-6, description="Number that is added to the standard deviation."
    )
    ratio_clip_eps: Annotated[float, Field(gt=0, le=1)] = free(
        used_with=(_CLIPS, "algorithm.ratio_clip_eps_low=null or algorithm.ratio_clip_eps_high=null; use these two"),
        default=0.2,
        description="Clip the importance ratio to 1 - eps .. 1 + eps. With gmpo it bounds the logarithm of the ratio.",
    )
    ratio_clip_eps_low: Annotated[float, Field(gt=0, le=1)] | None = free(
        used_with=_CLIPS, default=None, description="Clip range below 1. None uses ratio_clip_eps."
    )
    ratio_clip_eps_high: PositiveFloat | None = free(
        used_with=_CLIPS, default=None, description="Clip range above 1. None uses ratio_clip_eps."
    )
    ratio_clip_c: Annotated[float, Field(gt=1, le=MAX_NUMBER)] = free(
        used_with="algorithm.loss_type=dual_clip",
        default=3.0,
        description="With dual_clip, the upper bound of the importance ratio for negative advantages.",
    )
    sapo_tau_positive: PositiveFloat = ruled(
        used_with="algorithm.loss_type=sapo",
        default=1.0,
        description="With sapo, the temperature of the gate for positive advantages.",
    )
    sapo_tau_negative: PositiveFloat = ruled(
        used_with="algorithm.loss_type=sapo",
        default=1.05,
        description="With sapo, the temperature of the gate for negative advantages.",
    )
    cov_share: Annotated[float, Field(gt=0, le=1)] = ruled(
        needs="algorithm.loss_type=clip_cov|kl_cov",
        default=2e-4,
        description="With clip_cov and kl_cov, the largest share of tokens to treat separately.",
    )
    cov_low: Number = ruled(
        needs="algorithm.loss_type=clip_cov",
        below="algorithm.cov_high",
        default=1.0,
        description="With clip_cov, the smallest covariance of a token to treat separately.",
    )
    cov_high: Number = ruled(
        needs="algorithm.loss_type=clip_cov",
        default=5.0,
        description="With clip_cov, the largest covariance of a token to treat separately.",
    )
    cov_kl: PositiveFloat = ruled(
        needs="algorithm.loss_type=kl_cov",
        default=1.0,
        description="With kl_cov, the weight of the KL penalty of the selected tokens.",
    )
    pass_k: Annotated[int, Field(ge=2, le=100_000)] | None = ruled(
        needs="algorithm.adv_type=pass_at_k",
        at_most="algorithm.group_size",
        default=None,
        description="With pass_at_k, the k. None uses group_size.",
    )
    positive_nll: NonNegativeFloat = free(
        default=0.0, description="Weight of the negative log-likelihood of right answers. 0 turns it off."
    )
    positive_above: Number = ruled(
        needs="algorithm.positive_nll>0; set it, for example to 0.1",
        default=0.0,
        description="A response counts as a right answer for positive_nll if its reward is above this value.",
    )
    distill_beta: NonNegativeFloat = ruled(
        needs="teachers; set for example teachers.main.path to its folder",
        excludes="algorithm.loss_type=clip_cov|kl_cov, which chooses tokens by covariance; use actor",
        default=0.0,
        description=(
            "Weight of the distillation term -(log p_policy - log p_teacher) in a token's advantage. 0 turns it "
            "off. Needs teachers."
        ),
    )
    distill_kl: Literal["sampled", "reverse", "forward"] = ruled(
        used_with="algorithm.distill_beta>0; set it, and teachers",
        excludes="a teacher's url",
        default="sampled",
        description=(
            "sampled uses the log-probs of sampled tokens. reverse and forward add KL(policy || teacher) or "
            "KL(teacher || policy) over the vocabulary to the loss."
        ),
    )
    calculate_entropy: bool = free(default=False, description="Compute the entropy of the policy for the metrics.")
    entropy_bonus: Number = free(
        needs="algorithm.calculate_entropy=true",
        default=0.0,
        description="Weight of the entropy in the loss. Needs calculate_entropy.",
    )
    normalize_advantages: bool = ruled(
        used_with="algorithm.adv_type!=reinforce_plus_plus|reinforce_plus_plus_baseline, which whiten anyway",
        excludes="algorithm.adv_type=none, which reads no rewards",
        default=False,
        description="Whiten advantages over all tokens of the rollout after the normalization within groups.",
    )
    early_stop_imp_ratio: PositiveFloat | None = free(
        default=None, description="Skip a mini-batch whose mean importance ratio exceeds this value. None skips none."
    )
    use_valid_token_scale: bool = ruled(
        used_with="algorithm.loss_agg_func=token-mean",
        default=False,
        description="Divide the loss by the valid tokens of the rollout instead of the mini-batch.",
    )
    dynamic_sampling_tries: NonNegativeInt = ruled(
        excludes="algorithm.distill_beta, which uses every group",
        default=0,
        description=(
            "Maximum number of extra rollouts per step that replace zero-variance groups (DAPO). 0 turns dynamic "
            "sampling off."
        ),
    )
    overlong_buffer: Annotated[float, Field(ge=0, lt=1)] = ruled(
        used_with="algorithm.adv_type!=none, which reads no rewards",
        excludes="algorithm.adv_type=gdpo; punish length by a reward function",
        default=0.0,
        description=(
            "Share of max_response_length at its end in which the reward decreases linearly. Tool results count, as "
            "they do for max_response_length. 0 turns the penalty off."
        ),
    )
    overlong_penalty: PositiveFloat = ruled(
        used_with="algorithm.overlong_buffer>0; set it, for example to 0.2",
        default=1.0,
        description="Reward that is lost at the end of the overlong buffer.",
    )
    overlong_filter: bool = Field(
        default=False,
        description=(
            "Exclude responses that were cut off at max_response_length from the loss. With agents this excludes all "
            "conversations that a limit ended, also of turns or time."
        ),
    )
    correction: CorrectionConfig = free(
        default=CorrectionConfig(), description="Corrections for samples from another policy than the current one."
    )

    @property
    def clip_low(self) -> float:
        return self.ratio_clip_eps if self.ratio_clip_eps_low is None else self.ratio_clip_eps_low

    @property
    def clip_high(self) -> float:
        return self.ratio_clip_eps if self.ratio_clip_eps_high is None else self.ratio_clip_eps_high

    @property
    def is_sft(self) -> bool:
        return self.recipe == "sft"

    @property
    def length_keys(self) -> str:
        """The keys of the config that limit the tokens of a sample."""
        return "data.max_length" if self.is_sft else "data.max_prompt_length + rollout.max_response_length"

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
        """Return the bytes per element of the reference in a checkpoint; weights take `itemsize`. 0 if it is not
        saved.
        """
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

    @property
    def has_sequence_sums(self) -> bool:
        """True if the loss of a token depends on a sum or maximum over its whole response."""
        c = self.correction
        return (
            self.loss_type in ("gspo", "gspo_token", "gmpo")
            or c.importance == "sequence"
            or c.mask in ("sequence", "geometric")
            or c.reject.startswith("seq_")
            or c.veto_below is not None
            or c.off_policy_threshold is not None
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_recipe(cls, value: Any) -> Any:
        """Fill in the recipe's keys that are not set under any name. The field itself checks for unknown recipes."""
        if isinstance(value, dict):
            value = from_rlinf(value)
        if not isinstance(value, dict) or not isinstance(value.get("recipe"), str):
            return value
        recipe = RECIPES.get(value["recipe"], {})
        inner = {name: {**recipe[name], **value[name]} for name in recipe if isinstance(value.get(name), dict)}
        return {**recipe, **value, **inner}

    def _problems(self) -> Iterator[str]:
        if self.adv_type == "grpo_leave_one_out" and self.group_size < 3:
            yield (
                f"algorithm.group_size={self.group_size} conflicts with algorithm.adv_type=grpo_leave_one_out, which"
                " needs a deviation of the others; raise it to 3"
            )
