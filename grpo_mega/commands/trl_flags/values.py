"""Map the values of flags to the keys of a config.

TRL counts optimizer steps and batches of samples. The config counts rollouts (`steps`), prompts per rollout and optimizer steps
per rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo_mega.commands.trl_flags.flags import FLAGS, Values
from grpo_mega.commands.trl_flags.rewards import reward_override
from grpo_mega.config import Config, apply_override
from grpo_mega.errors import ConfigError

Raw = dict[str, Any]  # a config before validation
_PER_DEVICE_DEFAULT = 8  # TRL's default
_BATCH_FLAGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)
# TRL's loss_type sets how tokens are aggregated, and for some values the objective.
LOSS_TYPES: Mapping[str, Raw] = {
    "grpo": {"loss_agg_func": "seq-mean-token-mean"},
    "sapo": {"loss_agg_func": "seq-mean-token-mean", "loss_type": "sapo"},
    "dapo": {"loss_agg_func": "token-mean"},
    "bnpo": {"loss_agg_func": "token-mean"},
    "dr_grpo": {"loss_agg_func": "seq-mean-token-sum-norm"},
    "cispo": {"loss_agg_func": "token-mean", "loss_type": "cispo", "ratio_clip_eps_low": 1.0, "ratio_clip_eps_high": 4.0},
}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}


def to_raw(values: Values, dp_size: int, count_prompts: Callable[[], int]) -> Raw:
    """Return the flags' config, without model and data. `count_prompts` returns the size of the training set.

    Raise ConfigError if values contradict each other or this trainer does not support them.
    """
    raw: Raw = {}
    for name, value in values.items():
        if FLAGS[name].key is not None:
            _put(raw, str(FLAGS[name].key), value)
    for override in reward_override(values.get("reward_funcs"), values.get("reward_weights")):
        apply_override(raw, override)
    _model(values, raw)
    raw["algorithm"] = raw.get("algorithm", {}) | _algorithm(values)
    _batch(values, raw, dp_size)
    _reference(values, raw)
    _length(values, raw, count_prompts)
    _optimizer(values, raw)
    _intervals(values, raw)
    return raw


def optimizer_steps(raw: Raw) -> int:
    """Return the number of optimizer steps per rollout."""
    return int(_get(raw, "batch.mini_batches") * _get(raw, "batch.epochs"))


def _model(values: Values, raw: Raw) -> None:
    dtype = values.get("dtype")
    if "bf16" in values:
        from_bf16 = "bfloat16" if values["bf16"] else "float32"
        if dtype not in (None, "auto", from_bf16):
            raise ConfigError(f"--bf16 {str(values['bf16']).lower()} contradicts --dtype {dtype}; give one of them")
        dtype = from_bf16
    if dtype not in (None, "auto"):
        _put(raw, "model.dtype", dtype)
    if "gradient_checkpointing" in values:
        _put(raw, "model.recompute", "full" if values["gradient_checkpointing"] else "none")


def _algorithm(values: Values) -> Raw:
    name = values.get("loss_type", "grpo")
    if name not in LOSS_TYPES:
        raise ConfigError(
            f"--loss_type {name} is not among {', '.join(LOSS_TYPES)}; for other methods see --set algorithm.recipe="
        )
    raw = dict(LOSS_TYPES[name]) if "loss_type" in values else {}
    if _one_of(values, "importance_sampling_level", ("token", "sequence"), "token") == "sequence":
        _needs_clipped(name, "importance_sampling_level", "sequence")
        raw["loss_type"] = "gspo"
    if "epsilon_high" in values:
        raw["ratio_clip_eps_high"] = values["epsilon_high"]
        if name == "cispo":  # cispo limits the ratio itself, not its distance from 1
            if values["epsilon_high"] <= 1:
                raise ConfigError(
                    f"--epsilon_high {values['epsilon_high']:g} is the largest ratio of --loss_type cispo; "
                    "give one above 1, for example 5"
                )
            raw["ratio_clip_eps_high"] = values["epsilon_high"] - 1
    if "delta" in values:
        _needs_clipped(name, "delta", f"{values['delta']:g}")
        if raw.get("loss_type") == "gspo":
            raise ConfigError(
                f"--delta {values['delta']:g} cannot be combined with --importance_sampling_level sequence; leave one out"
            )
        raw |= {"loss_type": "dual_clip", "ratio_clip_c": values["delta"]}
    if "scale_rewards" in values:
        scale = _one_of(values, "scale_rewards", ("group", "batch", "none", "true", "false"), "group")
        raw |= {"normalize_by_std": scale in ("group", "batch", "true"), "std_over": "batch" if scale == "batch" else "group"}
    sums = ("sum_then_normalize", "normalize_then_sum")
    if _one_of(values, "multi_objective_aggregation", sums, sums[0]) == sums[1]:
        raw["adv_type"] = "gdpo"
    if values.get("entropy_coef"):
        raw |= {"entropy_bonus": values["entropy_coef"], "calculate_entropy": True}
    if "use_bias_correction_kl" in values:
        raw["kl_penalty_type"] = "low_var_kl_weighted" if values["use_bias_correction_kl"] else "low_var_kl"
    return raw


def _needs_clipped(loss_type: str, flag: str, value: str) -> None:
    if loss_type in ("cispo", "sapo"):
        raise ConfigError(f"--{flag} {value} cannot be combined with --loss_type {loss_type}; leave one out")


def _batch(values: Values, raw: Raw, dp_size: int) -> None:
    """Set prompts per rollout with TRL's arithmetic: passes of per_device_train_batch_size samples per data-parallel rank."""
    given = [name for name in _BATCH_FLAGS if name in values]
    for name in given:
        if values[name] < 1:
            raise ConfigError(f"--{name} {values[name]} is not above 0; raise it")
    if not given:
        if longest_sample(raw) > _get(raw, "batch.tokens_per_micro_batch"):
            _put(raw, "batch.tokens_per_micro_batch", longest_sample(raw))
        return
    if "steps_per_generation" in values and "generation_batch_size" in values:
        raise ConfigError("--steps_per_generation and --generation_batch_size mean the same; give one of them")
    per_device = values.get("per_device_train_batch_size", _PER_DEVICE_DEFAULT)
    accumulation = values.get("gradient_accumulation_steps", 1)
    per_pass = per_device * dp_size
    passes, rest = divmod(
        values.get("generation_batch_size", per_pass * values.get("steps_per_generation", accumulation)), per_pass
    )
    if rest:
        raise ConfigError(
            f"--generation_batch_size {values['generation_batch_size']} is not a multiple of per_device_train_batch_size="
            f"{per_device} x {dp_size} data-parallel ranks; use {passes * per_pass or per_pass} or {(passes + 1) * per_pass}"
        )
    mini_batches, rest = divmod(passes, accumulation)
    if rest:
        raise ConfigError(
            f"--gradient_accumulation_steps {accumulation} does not divide the {passes} passes of a rollout "
            f"(steps_per_generation); raise these to {(mini_batches + 1) * accumulation}"
        )
    group_size = _get(raw, "algorithm.group_size")
    num_samples = passes * per_pass
    num_prompts, rest = divmod(num_samples, max(1, group_size))
    if rest or num_prompts % mini_batches:
        fitting = math.lcm(group_size * mini_batches, passes * dp_size) // (passes * dp_size)
        raise ConfigError(
            f"a rollout of per_device_train_batch_size={per_device} x {passes} passes x {dp_size} data-parallel ranks = "
            f"{num_samples} samples is not {mini_batches} times whole groups of num_generations={group_size}; "
            f"use --per_device_train_batch_size {fitting} or a multiple, or change --num_generations"
        )
    batch = {"prompts_per_step": num_prompts, "mini_batches": mini_batches}
    raw["batch"] = raw.get("batch", {}) | batch | {"tokens_per_micro_batch": per_device * longest_sample(raw)}


def longest_sample(raw: Raw) -> int:
    """Return the length of the longest possible sample, in tokens."""
    return int(_get(raw, "data.max_prompt_length") + _get(raw, "rollout.max_response_length"))


def _reference(values: Values, raw: Raw) -> None:
    """Set how the reference follows the policy, with TRL's defaults."""
    if values.get("sync_ref_model"):
        _put(raw, "algorithm.ref_model_sync_steps", -(-values.get("ref_model_sync_steps", 512) // optimizer_steps(raw)))
        _put(raw, "algorithm.ref_model_mixup_alpha", values.get("ref_model_mixup_alpha", 0.6))
        return
    for name in ("ref_model_sync_steps", "ref_model_mixup_alpha"):
        if name in values:
            raise ConfigError(f"--{name} {values[name]:g} needs --sync_ref_model true; give it, or leave {name} out")


def _length(values: Values, raw: Raw, count_prompts: Callable[[], int]) -> None:
    if values.get("max_steps", -1) > 0:
        raw["steps"] = -(-values["max_steps"] // optimizer_steps(raw))
        return
    epochs = values.get("num_train_epochs", 1.0)
    if not epochs > 0:
        raise ConfigError(f"--num_train_epochs {epochs:g} is not above 0; raise it, or give --max_steps")
    raw["steps"] = max(1, math.floor(epochs * count_prompts() / _get(raw, "batch.prompts_per_step")))


def _optimizer(values: Values, raw: Raw) -> None:
    if "lr_scheduler_type" in values:
        _put(raw, "optimizer.schedule", SCHEDULES[_one_of(values, "lr_scheduler_type", tuple(SCHEDULES), "constant")])
    if "warmup_steps" in values and "warmup_ratio" in values:
        raise ConfigError("--warmup_steps and --warmup_ratio mean the same; give one of them")
    warmup = values.get("warmup_ratio", values.get("warmup_steps"))
    if warmup is not None:
        if "warmup_ratio" in values and not 0 <= warmup <= 1:
            raise ConfigError(f"--warmup_ratio {warmup:g} is not between 0 and 1; for a number of steps use --warmup_steps")
        is_share = "warmup_ratio" in values or 0 < warmup < 1
        steps = math.ceil(warmup * raw["steps"] * optimizer_steps(raw)) if is_share else int(warmup)
        _put(raw, "optimizer.warmup_steps", steps)
    if "adam_beta1" in values or "adam_beta2" in values:
        first, second = _get(raw, "optimizer.betas")
        _put(raw, "optimizer.betas", [values.get("adam_beta1", first), values.get("adam_beta2", second)])


def _intervals(values: Values, raw: Raw) -> None:
    """Set the intervals of checkpoints and evaluations, and the run's log."""
    for event, key in (("save", "checkpoint.interval"), ("eval", "eval.interval")):
        strategy = _one_of(values, f"{event}_strategy", ("steps", "no"), "steps")
        interval = values.get(f"{event}_steps")
        if f"{event}_strategy" in values and strategy == "steps" and interval is None:
            raise ConfigError(f"--{event}_strategy steps needs --{event}_steps; give it")
        if interval is not None and strategy == "steps":
            _put(raw, key, -(-interval // optimizer_steps(raw)))
    if "report_to" in values:
        for name in values["report_to"]:
            if name not in ("wandb", "none", "all"):
                raise ConfigError(
                    f"--report_to {name} is not written; use wandb or none: output_dir/metrics.jsonl has all metrics"
                )
        _put(raw, "log.wandb", values["report_to"] != ["none"])


def _one_of(values: Values, name: str, known: tuple[str, ...], default: str) -> str:
    value = str(values.get(name, default))
    if value.lower() not in known:
        raise ConfigError(f"--{name} {value} is not among {', '.join(known)}; use one of them")
    return value.lower()


def _get(raw: Raw, key: str) -> Any:
    """Return the value of a key, or its default."""
    section, _, name = key.partition(".")
    schema: Any = Config.model_fields[section].annotation
    return raw.get(section, {}).get(name, schema.model_fields[name].default)


def _put(raw: Raw, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
    raw[leaf] = value
