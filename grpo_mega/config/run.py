"""The config of a run, and its sections for model, precision, layout, batch, optimizer, evaluation and logs.

A key's comment gives its meaning and unit, and the meaning of None or 0. Validators hold the rules that need the config alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from grpo_mega.config.algorithm import AlgorithmConfig
from grpo_mega.config.base import (
    LIST,
    MAX_RANKS,
    FilePath,
    Fraction,
    Momentum,
    NonNegativeFloat,
    NonNegativeInt,
    NumRanks,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    any_divisor,
    tokens_on_rank,
)
from grpo_mega.config.data import DataConfig
from grpo_mega.config.rewards import RewardsConfig
from grpo_mega.config.rollout import RolloutConfig, SyncConfig


class RouterConfig(Section):
    """Train the routers of MoE models; they compute in fp32. megatron/routers.py says over what a loss is averaged."""

    balancing: Literal["none", "aux_loss", "seq_aux_loss"] = "none"  # loss of uneven loads, within a micro-batch or a sample
    aux_loss_coeff: NonNegativeFloat = 0.0  # of that loss
    z_loss_coeff: NonNegativeFloat = 0.0  # of large logits
    bias_update_rate: NonNegativeFloat = 0.0  # of the bias per expert that some families have, per optimizer step; 0: it stays
    capacity_factor: PositiveFloat | None = None  # an expert drops tokens above this multiple of an even load; None: none
    freeze: bool = False  # no training of routers

    @model_validator(mode="after")
    def _check(self) -> RouterConfig:
        if (self.balancing == "none") != (self.aux_loss_coeff == 0):
            raise ValueError(
                f"model.router.balancing={self.balancing} contradicts model.router.aux_loss_coeff={self.aux_loss_coeff:g}; "
                "set both or neither"
            )
        moved = {name: getattr(self, name) for name in ("aux_loss_coeff", "z_loss_coeff", "bias_update_rate")}
        for name, value in moved.items():
            if self.freeze and value:
                raise ValueError(f"model.router.{name}={value:g} contradicts model.router.freeze=true; remove one of them")
        return self


class ModelConfig(Section):
    path: FilePath  # folder of a Hugging Face or converted Megatron checkpoint; with init=random its config.json is enough
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    init: Literal["checkpoint", "random"] = "checkpoint"
    recompute: Literal["none", "selective", "full"] = (
        "none"  # activations in the backward pass; selective: of core attention and MLP
    )
    router: RouterConfig = RouterConfig()
    grouped_experts: bool = False  # a product for all experts of a layer at once; Transformer Engine's
    fused_permutation: bool = False  # of tokens to experts and back; Transformer Engine's


class TeacherConfig(Section):
    """A model of the policy's tokenizer to distil from; it computes in model.dtype, in the policy's layout."""

    path: FilePath  # folder of a Hugging Face or converted Megatron checkpoint; with a url its config and tokenizer are enough
    url: Annotated[str, Field(pattern=r"^https?://[^/]+$")] | None = None  # of an SGLang server that has it, to ask instead


class GuardConfig(Section):
    """Watch for spikes of gradient norms per layer, and for train-inference mismatch; see megatron/guard.py."""

    grad_spike: Annotated[PositiveFloat, Field(gt=1)] | None = (
        10.0  # warn at this multiple of the median of the layer's last norms; None: off
    )
    history: Annotated[int, Field(ge=4, le=100_000)] = 32  # optimizer steps over which the median is taken
    fall_back: bool = False  # FP8 only: at a spike, compute the first and last `layers` decoder layers, then all, in bf16
    layers: PositiveInt = 2
    steps: PositiveInt = 20  # optimizer steps that a fallback lasts


class PrecisionConfig(Section):
    """FP8 for the linear layers of attention and MLP; norms, router, embedding and output layer stay in model.dtype."""

    fp8: Literal["e4m3", "hybrid"] | None = None  # hybrid: gradients in e5m2; an error without Transformer Engine
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"  # requirements of each: hardware/fp8.py
    first_layers_bf16: NonNegativeInt = 0  # decoder layers at the start that stay in bf16
    last_layers_bf16: NonNegativeInt = 0  # and at the end
    fp8_reference: bool = False  # the reference computes in FP8 too
    fp8_parameters: bool = False  # keep the weights, and gather them over DP ranks, in FP8; master weights stay fp32
    # fp8_recipe=delayed: scale by the largest or the newest of the maxima of this many past micro-batches. These are
    # Transformer Engine's defaults; Megatron's, 1 and most_recent, saturate whenever a maximum grows.
    fp8_amax_history_len: Annotated[int, Field(gt=0, le=1_000_000)] = 1024
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _check(self) -> PrecisionConfig:
        if self.fp8 is None:
            given = self.model_dump(exclude={"fp8", "fp8_recipe", "guard"}, exclude_defaults=True)
            given |= {"guard.fall_back": True} if self.guard.fall_back else {}
            for name, value in given.items():
                raise ValueError(f"precision.{name}={value} needs precision.fp8; set it to hybrid or e4m3, or leave {name} out")
            return self
        if self.fp8_recipe != "delayed":
            history = {"fp8_amax_history_len", "fp8_amax_compute_algo"}
            for name, value in self.model_dump(include=history, exclude_defaults=True).items():
                raise ValueError(
                    f"precision.{name}={value} needs precision.fp8_recipe=delayed, which alone keeps a history; "
                    f"set it, or leave {name} out"
                )
        if self.fp8_parameters and self.fp8_recipe == "mxfp8":
            raise ValueError(
                "precision.fp8_parameters=true: Megatron's data parallelism cannot hold weights of fp8_recipe='mxfp8' in FP8; "
                "leave fp8_parameters out, or use blockwise or tensorwise"
            )
        if self.fp8_parameters and (self.guard.fall_back or not self.fp8_reference):
            raise ValueError(
                "precision.fp8_parameters=true leaves no bf16 weights to compute with; set precision.fp8_reference=true and "
                "precision.guard.fall_back=false, or leave fp8_parameters out"
            )
        if self.fp8_recipe == "delayed" and (
            self.first_layers_bf16 or self.last_layers_bf16 or self.guard.fall_back or not self.fp8_reference
        ):
            raise ValueError(
                "precision.fp8_recipe='delayed' cannot leave layers or the reference in bf16; use tensorwise, "
                "or set fp8_reference=true, guard.fall_back=false and first_layers_bf16=last_layers_bf16=0"
            )
        return self


class LayoutConfig(Section):
    tp: NumRanks = 1
    pp: NumRanks = 1
    vpp: NumRanks | None = None  # model chunks per pipeline rank; None or 1: no interleaving
    cp: NumRanks = 1  # ranks that share each sequence, for long ones; every sample is padded to a multiple of 2 * cp tokens
    # Of Transformer Engine's attention. p2p: keys and values go round. a2a: a rank has all tokens for some heads, of keys too.
    cp_comm_type: Literal["p2p", "a2a"] = "p2p"
    dp: NumRanks | None = None  # None: under torchrun world size / (tp * cp * pp), else the smallest that ep fits
    ep: NumRanks = 1  # expert-parallel size of MoE models; must divide dp * cp
    sequence_parallel: bool = False
    order: Literal["tp-dp-pp", "tp-pp-dp"] = "tp-dp-pp"  # axes of the rank placement, fastest first
    layers_per_chunk: Annotated[tuple[PositiveInt, ...], LIST] | None = (
        None  # pp * vpp numbers, in model order; None: as even as possible
    )
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    engine_ranks: Annotated[int, Field(ge=0, le=MAX_RANKS)] = (
        0  # ranks after those of the trainer that only generate; for rollout.placement=separate
    )

    @property
    def num_trainers(self) -> int:
        """Return the number of ranks that hold the policy."""
        return self.tp * self.cp * self.pp * (self.dp or self.least_dp)

    @property
    def least_dp(self) -> int:
        """Return the smallest number of data-parallel ranks for which ep divides dp * cp."""
        return self.ep // math.gcd(self.ep, self.cp)

    @property
    def world_size(self) -> int:
        return self.num_trainers + self.engine_ranks

    @model_validator(mode="after")
    def _check(self) -> LayoutConfig:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("layout.sequence_parallel=true needs layout.tp > 1; set it to false or raise tp")
        if self.dp is not None and self.dp * self.cp % self.ep:
            times = f" times layout.cp={self.cp}" if self.cp > 1 else ""
            raise ValueError(
                f"layout.ep={self.ep} does not divide layout.dp={self.dp}{times}; use {any_divisor(self.dp * self.cp)}"
            )
        if (self.vpp or 1) > 1 and self.pp == 1:
            raise ValueError(f"layout.vpp={self.vpp} needs layout.pp > 1; leave vpp out or raise pp")
        num_chunks = self.pp * (self.vpp or 1)
        if self.layers_per_chunk is not None and len(self.layers_per_chunk) != num_chunks:
            raise ValueError(
                f"layout.layers_per_chunk={list(self.layers_per_chunk)} has {len(self.layers_per_chunk)} entries; "
                f"give pp * vpp = {num_chunks}"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("layout.overlap_param_gather=true needs layout.overlap_grad_reduce=true")
        return self


class BatchConfig(Section):
    prompts_per_step: PositiveInt = 32
    mini_batches: PositiveInt = 1  # optimizer steps per pass over the rollout
    epochs: PositiveInt = 1  # passes over the rollout
    tokens_per_micro_batch: PositiveInt = 16384  # token budget of one forward and backward pass on each rank
    # Compute a group's prompt once in each micro-batch instead of once per sample: the same loss and gradients, in less time
    # where prompts are not much shorter than responses. On Megatron's local layers, for dense models.
    share_prompts: bool = False

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.epochs

    @model_validator(mode="after")
    def _check(self) -> BatchConfig:
        if self.prompts_per_step % self.mini_batches:
            raise ValueError(
                f"batch.mini_batches={self.mini_batches} does not divide batch.prompts_per_step={self.prompts_per_step}; "
                f"use {any_divisor(self.prompts_per_step)}"
            )
        return self


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0  # optimizer steps
    weight_decay: NonNegativeFloat = 0.0  # decoupled; applies to matrices and embeddings, not to norms and biases
    betas: Annotated[tuple[Momentum, Momentum], LIST] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0  # global L2 norm; 0: off
    moments_dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: Transformer Engine's precision-aware Adam

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}; lower it")
        return self


class EvalConfig(Section):
    interval: NonNegativeInt = 0  # steps between evaluations; 0: only before the first and after the last step
    num_prompts: PositiveInt | None = None  # per held-out set; None: all
    greedy: bool = True  # one greedy response per prompt: eval/score
    samples: Annotated[int, Field(ge=0, le=1024)] = 0  # sampled responses per prompt: eval/mean@N, pass@K, majority@K
    temperature: PositiveFloat = 1.0  # of the sampled responses
    top_p: Fraction = 1.0
    ks: Annotated[tuple[PositiveInt, ...], LIST] | None = None  # the K above; None: powers of two up to samples

    @property
    def all_ks(self) -> tuple[int, ...]:
        powers = (2**i for i in range(self.samples.bit_length()))
        return tuple(powers) if self.ks is None else self.ks

    @model_validator(mode="after")
    def _check(self) -> EvalConfig:
        if not self.greedy and not self.samples:
            raise ValueError("eval.greedy=false and eval.samples=0 leave nothing to evaluate; set one of them")
        for k in self.ks or ():
            if k > self.samples:
                raise ValueError(f"eval.ks={list(self.ks or ())} has {k}, above eval.samples={self.samples}; raise samples")
        return self


class CheckpointConfig(Section):
    interval: NonNegativeInt = 0  # steps between saves, and at the last step; 0: only when a run is stopped
    keep: PositiveInt = 2  # newest checkpoints kept; those that another run wrote are never deleted


class LogConfig(Section):
    wandb: bool = False  # offline if no API key is set
    wandb_project: str = "grpo_mega"
    samples_per_step: NonNegativeInt = 4  # written to samples.jsonl: at least so many, in whole groups; 0: none
    report_interval: NonNegativeInt = 10  # steps between updates of report.html; 0: only at the end
    profile: str | None = None  # steps to trace, "3" or "3-4"; see observe/tracing.py
    progress: bool = True

    @property
    def profiled_steps(self) -> range:
        first, _, last = (self.profile or "1-0").partition("-")
        return range(int(first), int(last or first) + 1)

    @field_validator("profile", mode="before")
    @classmethod
    def _are_steps(cls, value: object) -> str | None:
        if value is None:
            return None
        first, separator, last = str(value).partition("-")
        if not (first.isdecimal() and (last.isdecimal() if separator else True) and 1 <= int(first) <= int(last or first)):
            raise ValueError(f"log.profile={str(value)!r} is neither a step nor a range of steps; give it like 3 or 3-4")
        return str(value)


class Config(Section):
    run_dir: FilePath
    steps: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU where torch sees one; one that it cannot use is an error
    model: ModelConfig
    teachers: dict[str, TeacherConfig] = Field(default={})  # by name; for algorithm.distill_beta
    precision: PrecisionConfig = PrecisionConfig()
    layout: LayoutConfig = LayoutConfig()
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rewards: RewardsConfig = RewardsConfig()
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    hang_deadline_s: Seconds = 480.0  # longest time without progress of a rank, in phases without a deadline of their own
    max_nonfinite_steps: PositiveInt = 3  # consecutive steps with a non-finite loss or gradient, after which the run stops

    @property
    def needs_old_logprobs(self) -> bool:
        """True if old_logprobs are computed before the update; with one optimizer step they equal the update's own."""
        return self.batch.optimizer_steps > 1 or self.algorithm.has_kl_reward or self.algorithm.needs_mini_batch

    @property
    def deadline_of_phase(self) -> dict[str, float]:
        """Longest time without progress, in seconds, of the phases that may take longer than `hang_deadline_s`."""
        longest = {"sample": self.rollout.phase_deadline_s, "reward": self.rewards.deadline_s}
        longest["refresh"] = self.rewards.refresh_deadline_s
        longest |= dict.fromkeys(("wake", "sleep", "sync"), self.rollout.start_deadline_s)
        return {phase: seconds + self.hang_deadline_s for phase, seconds in longest.items()}

    @property
    def engine_dtype(self) -> str:
        return self.rollout.dtype or self.model.dtype

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.log.profile and self.log.profiled_steps[-1] > self.steps:
            raise ValueError(f"log.profile={self.log.profile!r} is beyond steps={self.steps}; name steps of the run")
        if self.batch.share_prompts and self.layout.cp > 1:
            raise ValueError(f"batch.share_prompts=true: must not be with layout.cp={self.layout.cp}; remove one of them")
        if self.rollout.routing_replay and self.model.router.capacity_factor is not None:
            raise ValueError(
                f"model.router.capacity_factor={self.model.router.capacity_factor:g} drops tokens that rollout.routing_replay "
                "sends to the engine's experts; remove one of them"
            )
        if self.precision.fp8 and self.model.dtype != "bfloat16":
            raise ValueError(f"precision.fp8={self.precision.fp8!r} needs model.dtype=bfloat16, not {self.model.dtype}; set it")
        if self.optimizer.moments_dtype == "bfloat16" and self.model.dtype != "bfloat16":
            raise ValueError(f"optimizer.moments_dtype=bfloat16 needs model.dtype=bfloat16, not {self.model.dtype}; set it")
        if self.precision.fp8_parameters and self.algorithm.ref_model_sync_steps is not None:
            raise ValueError("algorithm.ref_model_sync_steps: must not be set with precision.fp8_parameters; leave one out")
        if self.rollout.is_separate != (self.layout.engine_ranks > 0):
            raise ValueError(
                f"rollout.placement={self.rollout.placement} and layout.engine_ranks={self.layout.engine_ranks} contradict one "
                "another; set placement=separate and engine_ranks to the number of ranks that only generate, or neither"
            )
        if self.rewards.refresh_command is not None and self.algorithm.ref_model_sync_steps is None:
            raise ValueError("rewards.refresh_command needs iterations to run between; set algorithm.ref_model_sync_steps")
        if self.data.replay_fraction != 0.1 and self.rewards.refresh_command is None:
            raise ValueError(f"data.replay_fraction={self.data.replay_fraction} needs rewards.refresh_command; leave it out")
        if self.algorithm.adv_type == "gdpo" and len(self.rewards.functions) < 2:
            raise ValueError("algorithm.adv_type=gdpo normalises several rewards, but rewards.functions has one; use grpo")
        factors = [function.name for function in self.rewards.functions if function.multiplies]
        if self.algorithm.adv_type == "gdpo" and factors:
            raise ValueError(f"algorithm.adv_type=gdpo adds rewards, but {factors[0]!r} multiplies them; leave multiplies out")
        if self.algorithm.loss_type == "kl_cov" and self.batch.optimizer_steps == 1:
            raise ValueError(
                "algorithm.loss_type=kl_cov has a penalty of 0 in the first optimizer step of a rollout; raise "
                "batch.mini_batches or batch.epochs above 1"
            )
        for problem in self._teacher_problems():
            raise ValueError(problem)
        longest = self.data.max_prompt_length + self.rollout.max_response_length
        least = tokens_on_rank(longest, self.layout.cp)
        if least > self.batch.tokens_per_micro_batch:
            share = f" over layout.cp={self.layout.cp} ranks" if self.layout.cp > 1 else ""
            raise ValueError(
                f"batch.tokens_per_micro_batch={self.batch.tokens_per_micro_batch} cannot hold the longest sample, "
                f"data.max_prompt_length + rollout.max_response_length = {longest}{share}; raise it to at least {least}"
            )
        return self

    def _teacher_problems(self) -> Iterator[str]:
        beta, column, names = self.algorithm.distill_beta, self.data.teacher_column, ", ".join(self.teachers)
        if self.algorithm.adv_type == "none":
            if not beta:
                yield "algorithm.adv_type=none: leaves nothing to learn without algorithm.distill_beta; set it, and teachers"
            if self.algorithm.normalize_advantages or self.algorithm.has_kl_reward:
                yield "algorithm.adv_type=none: must not be with normalize_advantages or kl_in=reward, which move rewards' part"
        if beta and not self.teachers:
            yield f"algorithm.distill_beta={beta} needs a teacher; set for example teachers.main.path to its folder"
        if self.teachers and not beta:
            yield f"teachers={names} needs algorithm.distill_beta > 0, or algorithm.recipe=opd; set one of them"
        if len(self.teachers) > 1 and column is None:
            yield f"teachers={names} needs data.teacher_column, the column that names each row's teacher; set it"
        urls = [teacher.url for teacher in self.teachers.values() if teacher.url is not None]
        if urls and self.algorithm.distill_kl != "sampled":
            yield f"algorithm.distill_kl={self.algorithm.distill_kl}: must be sampled with a teacher's url; leave one out"
        if urls and self.rollout.temperature != 1:
            yield (
                f"rollout.temperature={self.rollout.temperature}: must be 1 with a teacher's url={urls[0]}, since servers give "
                "log-probs of given tokens at 1 alone; set it, or leave url out"
            )
        if column is not None and not self.teachers:
            yield f"data.teacher_column={column} needs teachers, which its values name; set them, or leave it out"
