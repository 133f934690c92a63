"""The config of a run, and its sections for layout, batch, evaluation, checkpoints and logs.

A key's description has its meaning and unit, and the meaning of None or 0. Its field has the rules about other keys.
`_problems` yields what no such rule can say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, field_validator, model_validator

from grpo_mega.config.algorithm import AlgorithmConfig
from grpo_mega.config.base import (
    LIST,
    MAX_RANKS,
    FilePath,
    Fraction,
    NonNegativeInt,
    NumRanks,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    any_divisor,
    broken_rules,
    free,
    ruled,
    tokens_on_rank,
)
from grpo_mega.config.data import DataConfig, RewardsConfig
from grpo_mega.config.model import ModelConfig, OptimizerConfig, PrecisionConfig, TeacherConfig
from grpo_mega.config.rollout import RolloutConfig, SyncConfig
from grpo_mega.errors import ConfigError


class LayoutConfig(Section):
    tp: NumRanks = ruled(
        needs="layout.sequence_parallel=true or a dense model; set layout.sequence_parallel",
        default=1,
        description="Tensor-parallel size.",
    )
    pp: NumRanks = Field(default=1, description="Pipeline-parallel size.")
    vpp: NumRanks | None = ruled(
        needs="layout.pp>1 or layout.vpp=1",
        default=None,
        description="Model chunks per pipeline rank, for the interleaved schedule. None or 1 does not interleave.",
    )
    cp: NumRanks = ruled(
        excludes=(
            "a sliding window; raise layout.tp or layout.pp instead",
            "linear attention, which reads each sample from its start to its end on one rank",
        ),
        default=1,
        description=(
            "Context-parallel size: ranks that share each sequence. Samples are padded to a multiple of 2 * cp tokens."
        ),
    )
    cp_comm_type: Literal["p2p", "a2a"] = Field(
        default="p2p",
        description=(
            "How Transformer Engine's attention exchanges keys and values. p2p passes them around a ring, a2a "
            "gives each rank all tokens of some heads."
        ),
    )
    token_dispatcher: Literal["alltoall", "deepep", "hybridep"] = ruled(
        needs="layout.ep>1 or layout.etp>1",
        default="alltoall",
        description="How tokens reach their experts. deepep and hybridep are DeepEP's kernels, not run on a GPU yet.",
    )
    dp: NumRanks | None = Field(
        default=None,
        description=(
            "Data-parallel size. None uses all ranks of the launcher, or without one the smallest size that ep allows."
        ),
    )
    ep: NumRanks = Field(default=1, description="Expert-parallel size of MoE models. Must divide tp * cp * dp / etp.")
    etp: NumRanks = ruled(
        divides="layout.tp", default=1, description="Number of ranks that split each expert. Must divide tp."
    )
    sequence_parallel: bool = ruled(
        needs="layout.tp>1",
        default=False,
        description="Split the activations between tensor-parallel regions along the sequence. Needs tp > 1.",
    )
    order: Literal["tp-dp-pp", "tp-pp-dp"] = Field(
        default="tp-dp-pp", description="Order of the axes in the rank placement, fastest axis first."
    )
    layers_per_chunk: Annotated[tuple[PositiveInt, ...], LIST] | None = Field(
        default=None,
        description=(
            "Number of decoder layers per model chunk, pp * vpp numbers in model order. None splits them evenly."
        ),
    )
    overlap_grad_reduce: bool = Field(
        default=False, description="Overlap the reduction of gradients with the backward pass."
    )
    overlap_param_gather: bool = ruled(
        needs="layout.overlap_grad_reduce=true",
        default=False,
        description="Overlap the gathering of parameters with the forward pass. Needs overlap_grad_reduce.",
    )
    engine_ranks: Annotated[int, Field(ge=0, le=MAX_RANKS)] = ruled(
        needs="rollout.placement=separate",
        default=0,
        description="Number of additional ranks that only generate. Used with rollout.placement=separate.",
    )

    @property
    def num_trainers(self) -> int:
        """Return the number of ranks that hold the policy."""
        return self.tp * self.cp * self.pp * (self.dp or self.least_dp)

    @property
    def least_dp(self) -> int:
        """Return the smallest number of data-parallel ranks that makes ep * etp divide tp * cp * dp."""
        return self.ep * self.etp // math.gcd(self.ep * self.etp, self.tp * self.cp)

    @property
    def world_size(self) -> int:
        return self.num_trainers + self.engine_ranks

    def _problems(self) -> Iterator[str]:
        size = (self.dp or 0) * self.cp * self.tp // self.etp
        if size % self.ep and not self.tp % self.etp:
            yield f"layout.ep={self.ep} does not divide tp * cp * dp / etp = {size}; use {any_divisor(size)}"
        num_chunks = self.pp * (self.vpp or 1)
        if self.layers_per_chunk is not None and len(self.layers_per_chunk) != num_chunks:
            yield (
                f"layout.layers_per_chunk={list(self.layers_per_chunk)} has {len(self.layers_per_chunk)} entries; "
                f"give pp * vpp = {num_chunks}"
            )


class BatchConfig(Section):
    prompts_per_step: PositiveInt = Field(
        default=32, description="Number of prompts in a step, each with algorithm.group_size samples; rows in sft."
    )
    mini_batches: PositiveInt = ruled(
        divides="batch.prompts_per_step",
        default=1,
        description="Number of optimizer steps per pass over the rollout. Must divide prompts_per_step.",
    )
    epochs: PositiveInt = Field(default=1, description="Number of passes over the rollout.")
    tokens_per_micro_batch: PositiveInt = free(
        default=16384, description="Maximum number of tokens in one forward and backward pass on each rank."
    )
    share_prompts: bool = ruled(
        excludes=(
            "layout.cp",
            "rollout.agent or rollout.tools, which may change the prompt",
            "a model with experts",
            "a sliding window or linear attention",
        ),
        default=False,
        description=(
            "Compute a group's prompt once per micro-batch instead of once per sample. The loss stays the same. "
            "For dense models on Megatron's local layers."
        ),
    )

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.epochs


class EvalConfig(Section):
    interval: NonNegativeInt = Field(
        default=0,
        description="Number of steps between evaluations. 0 evaluates only before the first and after the last step.",
    )
    num_prompts: PositiveInt | None = Field(
        default=None, description="Number of prompts per held-out set. None uses all."
    )
    greedy: bool = ruled(
        needs="eval.samples>0, because nothing is left to evaluate",
        default=True,
        description="Generate one greedy response per prompt, for eval/score.",
    )
    samples: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=0, description="Number of sampled responses per prompt, for eval/mean@N, pass@K and majority@K."
    )
    temperature: PositiveFloat = Field(default=1.0, description="Temperature of the sampled responses.")
    top_p: Fraction = Field(
        default=1.0,
        description=(
            "Sample the responses from the smallest set of tokens with this total probability. 1 uses all tokens."
        ),
    )
    ks: Annotated[tuple[PositiveInt, ...], LIST] | None = Field(
        default=None, description="Values of K for pass@K and majority@K. None uses the powers of two up to samples."
    )

    @property
    def all_ks(self) -> tuple[int, ...]:
        powers = (2**i for i in range(self.samples.bit_length()))
        return tuple(powers) if self.ks is None else self.ks

    def _problems(self) -> Iterator[str]:
        for k in self.ks or ():
            if k > self.samples:
                yield f"eval.ks={list(self.ks or ())} has {k}, above eval.samples={self.samples}; raise samples"


class CheckpointConfig(Section):
    interval: NonNegativeInt = Field(
        default=0,
        description=(
            "Number of steps between checkpoints. The last step saves one too. 0 saves only when a run is stopped."
        ),
    )
    keep: PositiveInt = Field(
        default=2, description="Number of newest checkpoints to keep. Checkpoints of another run are never deleted."
    )


class LogConfig(Section):
    wandb: bool = Field(
        default=False, description="Log to Weights & Biases. Without an API key the run is logged offline."
    )
    wandb_project: str = Field(default="grpo_mega", description="Project on Weights & Biases.")
    tensorboard: bool = ruled(
        needs="the package tensorboard; pip install 'grpo-mega[trackers]', or leave it out",
        default=False,
        description="Log to TensorBoard, in RUN_DIR/tensorboard. Needs the extra trackers of this package.",
    )
    samples_per_step: NonNegativeInt = Field(
        default=4, description="Minimum number of samples per step in samples.jsonl, in whole groups. 0 writes none."
    )
    report_interval: NonNegativeInt = Field(
        default=10, description="Number of steps between updates of report.html. 0 writes it only at the end."
    )
    profile: str | None = Field(
        default=None,
        description="Step, or range of steps, to trace with torch's profiler, such as 3 or 3-4. None traces none.",
    )
    progress: bool = Field(default=True, description="Show progress bars.")

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
        if not (
            first.isdecimal() and (last.isdecimal() if separator else True) and 1 <= int(first) <= int(last or first)
        ):
            raise ValueError(
                f"log.profile={str(value)!r} is neither a step nor a range of steps; give it like 3 or 3-4"
            )
        return str(value)


class Config(Section):
    run_dir: FilePath = free(
        description="Folder of the run: config, checkpoints, metrics, samples, report and exported model."
    )
    steps: PositiveInt = free(description="Number of steps to train. A step is one rollout and its optimizer steps.")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="Seed of sampling, data order and random weights."
    )
    device: Literal["auto", "cpu", "cuda"] = free(
        default="auto",
        description=(
            "Device to train on. auto uses a GPU if torch sees one, and fails if torch sees a GPU that it cannot use."
        ),
    )
    code_dir: FilePath | None = free(
        default=None,
        description=(
            "Folder to search for your own functions after the current folder. Without this key, a config file uses "
            "its own folder. None searches only the current folder."
        ),
    )
    model: ModelConfig = Field(description="The policy, and how its layers are built.")
    teachers: dict[str, TeacherConfig] = ruled(
        needs="algorithm.distill_beta>0; set it, or algorithm.recipe=opd",
        default={},
        description="Teachers to distil from, by name. Used with algorithm.distill_beta.",
    )
    precision: PrecisionConfig = Field(default=PrecisionConfig(), description="FP8 training.")
    layout: LayoutConfig = free(
        default=LayoutConfig(), description="How ranks share the model, the sequences and the data."
    )
    data: DataConfig = Field(description="Datasets and their columns.")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="How responses are generated.")
    sync: SyncConfig = free(default=SyncConfig(), description="The transfer of weights from the trainer to the engine.")
    algorithm: AlgorithmConfig = Field(
        default=AlgorithmConfig(), description="Advantages, loss, KL penalty and corrections."
    )
    rewards: RewardsConfig = Field(default=RewardsConfig(), description="The functions that score a response.")
    batch: BatchConfig = Field(
        default=BatchConfig(), description="How a rollout is split into optimizer steps and micro-batches."
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="AdamW and its learning rate.")
    eval: EvalConfig = free(default=EvalConfig(), description="Evaluation on held-out prompts.")
    checkpoint: CheckpointConfig = free(
        default=CheckpointConfig(), description="When checkpoints are saved, and how many are kept."
    )
    log: LogConfig = free(default=LogConfig(), description="Logs, samples, the report and traces.")
    hang_deadline_s: Seconds = free(
        default=480.0,
        description=(
            "Stop the run if a rank makes no progress for this many seconds. Phases with their own deadline add "
            "it to this one."
        ),
    )
    max_nonfinite_steps: PositiveInt = free(
        default=3, description="Stop the run after this many consecutive steps with a non-finite loss or gradient."
    )

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Raise ConfigError with a line per broken rule."""
        from grpo_mega.config import problems_of

        try:
            return handler(value)
        except ValidationError as error:
            raise ConfigError(*problems_of(cls, error)) from None

    @property
    def needs_old_logprobs(self) -> bool:
        """True if old_logprobs are computed before the update. With one optimizer step they equal the update's
        log-probs.
        """
        return self.batch.optimizer_steps > 1 or self.algorithm.has_kl_reward or self.algorithm.needs_mini_batch

    @property
    def deadline_of_phase(self) -> dict[str, float]:
        """Longest time without progress, in seconds, of the phases that may exceed `hang_deadline_s`."""
        longest = {"sample": self.rollout.phase_deadline_s, "reward": self.rewards.deadline_s}
        longest["refresh"] = self.rewards.refresh_deadline_s
        longest |= dict.fromkeys(("wake", "sleep", "sync"), self.rollout.start_deadline_s)
        return {phase: seconds + self.hang_deadline_s for phase, seconds in longest.items()}

    @property
    def collective_timeout_s(self) -> float:
        """Timeout of collectives, above the deadlines of the watchdog and of a server's start, which report more."""
        start_s = self.rollout.start_deadline_s if self.rollout.is_served else 0.0
        return max(600.0, 2 * self.hang_deadline_s, start_s + self.hang_deadline_s)

    @property
    def engine_dtype(self) -> str:
        return self.rollout.dtype or self.model.resolved_dtype

    def _problems(self) -> Iterator[str]:
        if self.log.profile and self.log.profiled_steps[-1] > self.steps:
            yield f"log.profile={self.log.profile!r} is beyond steps={self.steps}; name steps of the run"
        if not self.rewards.functions and self.rollout.agent is None:
            yield "rewards.functions is empty; name at least one, for example accuracy"
        elif self.algorithm.adv_type == "gdpo" and len(self.rewards.functions) < 2 and self.rollout.agent is None:
            yield "algorithm.adv_type=gdpo normalises several rewards, but rewards.functions has one; use grpo"
        factors = [function.name for function in self.rewards.functions if function.multiplies]
        if self.algorithm.adv_type == "gdpo" and factors:
            yield f"algorithm.adv_type=gdpo adds rewards, but {factors[0]!r} multiplies them; leave multiplies out"
        if self.algorithm.loss_type == "kl_cov" and self.batch.optimizer_steps == 1:
            yield (
                "algorithm.loss_type=kl_cov has a penalty of 0 in the first optimizer step of a rollout; raise "
                "batch.mini_batches or batch.epochs above 1"
            )
        url = next((teacher.url for teacher in self.teachers.values() if teacher.url is not None), None)
        yield from broken_rules(self)
        yield from broken_rules(self, {"a teacher's url": url}, f"{url}")
        if (a := self.algorithm).adv_type == "none" and not a.distill_beta:
            yield "algorithm.adv_type=none leaves nothing to learn without algorithm.distill_beta; set it, and teachers"
        if a.adv_type == "none" and a.has_kl_reward:
            yield "algorithm.kl_in=reward conflicts with algorithm.adv_type=none, which reads no rewards; use loss"
        if len(self.teachers) > 1 and self.data.teacher_column is None:
            yield (
                f"teachers={', '.join(self.teachers)} needs data.teacher_column, the column that names each row's"
                " teacher; set it"
            )
        longest = self.data.max_prompt_length + self.rollout.max_response_length
        least = tokens_on_rank(longest, self.layout.cp)
        if least > self.batch.tokens_per_micro_batch:
            share = f" over layout.cp={self.layout.cp} ranks" if self.layout.cp > 1 else ""
            yield (
                f"batch.tokens_per_micro_batch={self.batch.tokens_per_micro_batch} cannot hold the longest sample, "
                f"{self.algorithm.length_keys} = {longest}{share}; raise it to at least {least}"
            )
