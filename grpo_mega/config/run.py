"""The run's configuration: pydantic models, read from YAML with `--set a.b=c` on top; never imports torch.

`load(path, overrides)` returns a validated `Config` or raises ConfigError in one line that names the key, its value and the
remedy. Unknown keys are refused with the nearest known name. What needs the model or the data to be checked is checked in
`preflight.py`, also before any process group is touched.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from grpo_mega.config.algorithm import AlgorithmConfig
from grpo_mega.config.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from grpo_mega.config.data import DataConfig
from grpo_mega.config.messages import one_line
from grpo_mega.config.rewards import RewardsConfig
from grpo_mega.errors import ConfigError


class ModelConfig(Section):
    path: Path  # a Hugging Face or converted Megatron checkpoint, or a folder with a config.json alone if init is "random"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    init: Literal["checkpoint", "random"] = "checkpoint"
    recompute: Literal["none", "selective", "full"] = "none"  # in the backward pass; selective: attention's core, and the MLP


class GuardConfig(Section):
    """Watches gradient norms by layer, and the mismatch that rollout.mismatch_warn limits; see guard.py."""

    grad_spike: Annotated[float, Field(gt=1)] | None = 10.0  # times the median of a layer's last norms; None: not watched
    history: Annotated[int, Field(ge=4)] = 32  # optimizer steps that make up the median
    fall_back: bool = False  # FP8 only: the first and last `layers` decoder layers, then all, compute in bf16 for `steps` steps
    layers: PositiveInt = 2
    steps: PositiveInt = 20


class PrecisionConfig(Section):
    """FP8 for the linear layers of attention and MLP; norms, router, embedding and output layer stay in model.dtype."""

    fp8: Literal["e4m3", "hybrid"] | None = None  # hybrid: gradients in e5m2; needs Transformer Engine, never ignored without
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = "tensorwise"  # what each needs: fp8.py
    first_layers_bf16: Annotated[int, Field(ge=0)] = 0  # decoder layers at either end that stay in bf16
    last_layers_bf16: Annotated[int, Field(ge=0)] = 0
    fp8_reference: bool = False  # the reference computes in FP8 too
    fp8_parameters: bool = False  # the weights themselves are kept, and gathered over DP ranks, in FP8; fp32 masters as ever
    # delayed: the maxima of so many past micro-batches, of which the largest or the newest sets the scale. Transformer Engine's
    # defaults; Megatron's own, 1 and most_recent, saturates whenever a maximum grows.
    fp8_amax_history_len: PositiveInt = 1024
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
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt | None = None  # model chunks a pipeline rank holds; None or 1: no interleaving
    dp: PositiveInt | None = None  # None: what is left of the world size under torchrun, else ep
    ep: PositiveInt = 1  # of the data-parallel ranks, those over which a mixture's experts are spread
    sequence_parallel: bool = False
    order: Literal["tp-dp-pp", "tp-pp-dp"] = "tp-dp-pp"  # axes of the ranks, neighbours first
    layers_per_chunk: tuple[PositiveInt, ...] | None = None  # pp * vpp numbers, in model order; None: as even as can be
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * (self.dp or self.ep)

    @model_validator(mode="after")
    def _check(self) -> LayoutConfig:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("layout.sequence_parallel=true needs layout.tp > 1; set it to false or raise tp")
        if self.dp is not None and self.dp % self.ep:
            raise ValueError(f"layout.ep={self.ep} does not divide layout.dp={self.dp}; use {_divisors(self.dp)}")
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


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = "embedded"
    tp: PositiveInt = 1  # ranks that one engine spans: rank r serves engine r // tp; the embedded engine spans one
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off
    max_response_length: PositiveInt = 1024  # tokens
    stop_token_ids: tuple[int, ...] = ()  # besides all eos ids of the model's generation config
    max_concurrent: PositiveInt = 256  # sequences an engine decodes at once
    # A step begins so many times batch.prompts_per_step prompts and aborts the rest once enough groups are done: quicker where
    # few responses are long, and biased towards short ones (rollout/kept_length, aborted_length). Wants room in max_concurrent.
    oversample: Annotated[float, Field(ge=1)] = 1.0
    quantization: Literal["fp8"] | None = None  # of linear layers, before they are sent: blocks of 128 x 128, see weights/
    # What follows is for servers.
    cache_tokens: PositiveInt | None = None  # size of the KV cache; None: what max_concurrent needs (CPU), what fits (GPU)
    memory_fraction: Fraction | None = None  # of a GPU's memory for weights and KV cache; None: the server's default
    sleep: Literal["auto", "always", "never"] = "auto"  # give GPU memory back while training; auto: unless both fit
    max_restarts: Annotated[int, Field(ge=0)] = 3  # of one server in a run, before the run stops with a checkpoint
    start_deadline_s: PositiveFloat = 900.0
    stall_deadline_s: PositiveFloat = 60.0  # without a sample and without an answer to a health check, a server counts as hung
    phase_deadline_s: PositiveFloat = 14400.0  # one generation phase
    mismatch_warn: PositiveFloat = 0.02  # KL (k3) between engine and trainer, nats a token, above which a step warns
    mismatch_stop: PositiveFloat | None = 1.0  # and above which the run stops; None: never
    server_args: dict[str, str | int | float | bool] = Field(default={})  # further arguments of SGLang's, by its names

    def num_begun(self, prompts_per_step: int) -> int:
        """Prompts that a step begins."""
        return math.ceil(round(prompts_per_step * self.oversample, 6))

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.engine == "embedded" and self.tp > 1:
            raise ValueError(f"rollout.tp={self.tp} needs rollout.engine=sglang; the embedded engine spans one rank")
        if self.mismatch_stop is not None and self.mismatch_stop < self.mismatch_warn:
            raise ValueError(
                f"rollout.mismatch_stop={self.mismatch_stop} is below rollout.mismatch_warn={self.mismatch_warn}; raise it"
            )
        return self


class SyncConfig(Section):
    bucket_mib: PositiveFloat = 256.0  # of weights a rank hands to its engine at once; two of them are held
    prove: bool = True  # compare checksums of what the engine holds with the trainer's weights after every sync


class BatchConfig(Section):
    prompts_per_step: PositiveInt = 32
    mini_batches: PositiveInt = 1  # optimizer steps a pass over the rollout
    epochs: PositiveInt = 1  # passes over the rollout
    tokens_per_micro_batch: PositiveInt = 16384  # token budget of one forward/backward on a DP rank

    @property
    def optimizer_steps(self) -> int:
        return self.mini_batches * self.epochs

    @model_validator(mode="after")
    def _check(self) -> BatchConfig:
        if self.prompts_per_step % self.mini_batches:
            raise ValueError(
                f"batch.mini_batches={self.mini_batches} does not divide batch.prompts_per_step={self.prompts_per_step}; "
                f"use {_divisors(self.prompts_per_step)}"
            )
        return self


class OptimizerConfig(Section):
    lr: PositiveFloat = 1e-6
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0  # optimizer steps
    weight_decay: NonNegativeFloat = 0.0  # decoupled; of matrices, embeddings among them, not of norms and biases
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    clip_grad: NonNegativeFloat = 1.0  # global L2 norm; 0: off
    moments_dtype: Literal["float32", "bfloat16"] = "float32"  # bfloat16: Transformer Engine's precision-aware Adam

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr} is above optimizer.lr={self.lr}; lower it")
        return self


class EvalConfig(Section):
    interval: Annotated[int, Field(ge=0)] = 0  # steps between evaluations; 0: before the first and after the last step only
    num_prompts: PositiveInt | None = None  # of each held-out set; None: all
    greedy: bool = True  # one answer a prompt by greedy decoding: eval/score
    samples: Annotated[int, Field(ge=0, le=1024)] = 0  # drawn responses a prompt: eval/mean@N, pass@K, majority@K
    temperature: PositiveFloat = 1.0  # of the drawn ones
    top_p: Fraction = 1.0
    ks: tuple[PositiveInt, ...] | None = None  # the K; None: powers of two up to samples

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
    interval: Annotated[int, Field(ge=0)] = 0  # steps between saves, the last step included; 0: only when a run is stopped
    keep: PositiveInt = 2  # newest ones; what the run did not write stays in any case


class LogConfig(Section):
    wandb: bool = False  # offline where no API key is set
    wandb_project: str = "grpo_mega"
    samples_per_step: Annotated[int, Field(ge=0)] = 4  # written to samples.jsonl, in whole groups: at least so many; 0: none
    report_interval: Annotated[int, Field(ge=0)] = 10  # steps between refreshes of report.html; 0: at the end only
    profile: str | None = None  # steps to trace, "3" or "3-4"; see tracing.py
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
    run_dir: Path
    steps: PositiveInt
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ModelConfig
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
    hang_deadline_s: PositiveFloat = 480.0  # without progress at a rank, outside of phases with deadlines of their own
    max_nonfinite_steps: PositiveInt = 3  # in a row with a loss or gradient that is not finite, before the run stops

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether they are computed before the update. With one optimizer step a rollout they are the update's own."""
        return self.batch.optimizer_steps > 1 or self.algorithm.has_kl_reward

    @property
    def deadline_of_phase(self) -> dict[str, float]:
        """Seconds without progress, of those phases that may take longer than `hang_deadline_s`."""
        longest = {"sample": self.rollout.phase_deadline_s, "reward": self.rewards.deadline_s}
        longest |= dict.fromkeys(("wake", "sleep", "sync"), self.rollout.start_deadline_s)
        return {phase: seconds + self.hang_deadline_s for phase, seconds in longest.items()}

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.log.profile and self.log.profiled_steps[-1] > self.steps:
            raise ValueError(f"log.profile={self.log.profile!r} is beyond steps={self.steps}; name steps of the run")
        if self.precision.fp8 and self.model.dtype != "bfloat16":
            raise ValueError(f"precision.fp8={self.precision.fp8!r} needs model.dtype=bfloat16, not {self.model.dtype}; set it")
        if self.optimizer.moments_dtype == "bfloat16" and self.model.dtype != "bfloat16":
            raise ValueError(f"optimizer.moments_dtype=bfloat16 needs model.dtype=bfloat16, not {self.model.dtype}; set it")
        longest = self.data.max_prompt_length + self.rollout.max_response_length
        if longest > self.batch.tokens_per_micro_batch:
            raise ValueError(
                f"batch.tokens_per_micro_batch={self.batch.tokens_per_micro_batch} cannot hold the longest sample, "
                f"data.max_prompt_length + rollout.max_response_length = {longest}; raise it to at least {longest}"
            )
        return self


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Reads `path` (YAML), applies `overrides` ("a.b=c", c in YAML) in order, and validates. Raises ConfigError."""
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}; name an existing YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML ({' '.join(str(error).split())}); mend the file") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config {path} holds {type(raw).__name__}, not a mapping of keys; see examples/*.yaml")
    for override in overrides or []:
        apply_override(raw, override)
    return validate(raw)


def validate(raw: dict[str, Any]) -> Config:
    """A Config from a nested dict. Raises ConfigError, one line for the first problem found."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(one_line(Config, error)) from None


def dump(config: Config) -> str:
    """The whole config as YAML, defaults included; `load` of it gives the same Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Sets one value of a nested dict, "a.b=c" with c in YAML. Raises ConfigError."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} is not of the form key.subkey=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: {text!r} is not a YAML value") from None
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        if not isinstance(node.setdefault(parent, {}), dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
        node = node[parent]
    node[leaf] = value


def _divisors(n: int) -> str:
    found = [str(d) for d in range(1, n + 1) if n % d == 0]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]
