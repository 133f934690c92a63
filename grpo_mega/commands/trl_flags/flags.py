"""The flags of `python -m grpo_mega.grpo`: their table, and the parser for a command line.

The table has each flag's name, the kind of its value, and the config key that it sets. If the key is None, values.py or
sources.py handles the flag. A missing flag leaves the config's default. Underscores and dashes are the same in names, and so
are `--name value` and `--name=value`. A flag of true or false may stand alone. Errors are ConfigError in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_mega.errors import ConfigError

FLAG, WHOLE, NUMBER, TEXT, LIST = "true or false", "a whole number", "a number", "one value", "one value or more"


@dataclass(frozen=True)
class Flag:
    name: str
    kind: str
    key: str | None
    help: str


GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "model and data": (
        Flag("model_name_or_path", TEXT, None, "folder of a checkpoint, or a name on the Hugging Face hub (required)"),
        Flag("model_revision", TEXT, None, "branch, tag or commit on the hub"),
        Flag("dtype", TEXT, None, "bfloat16, float32, or auto: as in the model's config.json"),
        Flag("bf16", FLAG, None, "true: --dtype bfloat16; false: --dtype float32"),
        Flag("dataset_name", TEXT, None, "a file, a folder, or a name on the hub (required)"),
        Flag("dataset_config", TEXT, None, "configuration of a hub's data set"),
        Flag("dataset_train_split", TEXT, None, "split to train on; default: train"),
        Flag("dataset_test_split", TEXT, None, "split to evaluate on; default: none, or test with --eval_steps"),
        Flag("dataset_prompt_column", TEXT, "data.prompt_column", "default: the first of prompt, problem and question"),
        Flag("dataset_answer_column", TEXT, "data.answer_column", "default: answer, else solution"),
        Flag("system_prompt", TEXT, "data.system_prompt", "put before every prompt"),
        Flag("max_prompt_length", WHOLE, "data.max_prompt_length", "tokens; longer prompts are dropped"),
        Flag("shuffle_dataset", FLAG, "data.shuffle", ""),
    ),
    "rewards": (
        Flag("reward_funcs", LIST, None, "accuracy, format, ..., or dotted paths of your own functions"),
        Flag("reward_weights", LIST, None, "one for each function; default: 1"),
        Flag("scale_rewards", TEXT, None, "divide by the deviation of the group or the batch; none: do not (Dr. GRPO)"),
        Flag("multi_objective_aggregation", TEXT, None, "sum_then_normalize, or normalize_then_sum (GDPO)"),
    ),
    "sampling": (
        Flag("num_generations", WHOLE, "algorithm.group_size", "samples per prompt"),
        Flag("max_completion_length", WHOLE, "rollout.max_response_length", "tokens"),
        Flag("temperature", NUMBER, "rollout.temperature", ""),
        Flag("top_p", NUMBER, "rollout.top_p", ""),
        Flag("top_k", WHOLE, "rollout.top_k", "0: off"),
    ),
    "batch": (
        Flag("per_device_train_batch_size", WHOLE, None, "samples per data-parallel rank and pass; see below"),
        Flag("gradient_accumulation_steps", WHOLE, None, "passes per optimizer step; default: 1"),
        Flag("steps_per_generation", WHOLE, None, "passes per rollout; default: gradient_accumulation_steps"),
        Flag("generation_batch_size", WHOLE, None, "samples per rollout, in place of steps_per_generation"),
        Flag("num_iterations", WHOLE, "batch.epochs", "passes over each rollout"),
        Flag("max_steps", WHOLE, None, "optimizer steps; overrides num_train_epochs"),
        Flag("num_train_epochs", NUMBER, None, "passes over the data; default: 1"),
    ),
    "loss": (
        Flag("loss_type", TEXT, None, "grpo, dapo, dr_grpo, bnpo, cispo or sapo, as in TRL: the loss alone"),
        Flag("importance_sampling_level", TEXT, None, "token, or sequence (GSPO)"),
        Flag("beta", NUMBER, "algorithm.kl_beta", "weight of the KL penalty"),
        Flag("sync_ref_model", FLAG, None, "refresh the reference from the policy during the run"),
        Flag("ref_model_sync_steps", WHOLE, None, "optimizer steps between refreshes, in whole rollouts; default: 512"),
        Flag("ref_model_mixup_alpha", NUMBER, None, "the policy's share in a refreshed reference; default: 0.6"),
        Flag("use_bias_correction_kl", FLAG, None, "weigh the KL penalty by the importance ratio"),
        Flag("epsilon", NUMBER, "algorithm.ratio_clip_eps", "clip range of the importance ratio around 1"),
        Flag("epsilon_high", NUMBER, None, "the same upwards; for cispo the largest ratio itself"),
        Flag("off_policy_mask_threshold", NUMBER, "algorithm.correction.off_policy_threshold", "nats; off-policy masking"),
        Flag("delta", NUMBER, None, "largest ratio for negative advantages"),
        Flag("sapo_temperature_pos", NUMBER, "algorithm.sapo_tau_positive", ""),
        Flag("sapo_temperature_neg", NUMBER, "algorithm.sapo_tau_negative", ""),
        Flag("entropy_coef", NUMBER, None, "weight of an entropy bonus"),
        Flag("mask_truncated_completions", FLAG, "algorithm.overlong_filter", "leave truncated responses out of the loss"),
    ),
    "optimizer": (
        Flag("learning_rate", NUMBER, "optimizer.lr", ""),
        Flag("lr_scheduler_type", TEXT, None, "constant, constant_with_warmup, linear or cosine"),
        Flag("warmup_steps", NUMBER, None, "optimizer steps; below 1: a share of all"),
        Flag("warmup_ratio", NUMBER, None, "share of all optimizer steps"),
        Flag("weight_decay", NUMBER, "optimizer.weight_decay", ""),
        Flag("adam_beta1", NUMBER, None, ""),
        Flag("adam_beta2", NUMBER, None, ""),
        Flag("adam_epsilon", NUMBER, "optimizer.eps", ""),
        Flag("max_grad_norm", NUMBER, "optimizer.clip_grad", "0: off"),
        Flag("gradient_checkpointing", FLAG, None, "recompute activations in the backward pass"),
    ),
    "layout": (
        Flag("tensor_parallel", WHOLE, "layout.tp", "ranks that share each layer"),
        Flag("pipeline_parallel", WHOLE, "layout.pp", "ranks that share the layers"),
        Flag("data_parallel", WHOLE, "layout.dp", "replicas; default under torchrun: ranks / (tensor x pipeline)"),
        Flag("sequence_parallel", FLAG, "layout.sequence_parallel", ""),
    ),
    "run": (
        Flag("output_dir", TEXT, "run_dir", "the run's folder (required); the trained model is in its hf/"),
        Flag("seed", WHOLE, "seed", ""),
        Flag("save_strategy", TEXT, None, "steps, or no"),
        Flag("save_steps", WHOLE, None, "optimizer steps between checkpoints"),
        Flag("save_total_limit", WHOLE, "checkpoint.keep", "checkpoints kept"),
        Flag("eval_strategy", TEXT, None, "steps, or no"),
        Flag("eval_steps", WHOLE, None, "optimizer steps between evaluations"),
        Flag("report_to", LIST, None, "wandb, or none"),
        Flag("num_completions_to_print", WHOLE, "log.samples_per_step", "samples per step in output_dir/samples.jsonl"),
        Flag("resume", FLAG, None, "continue the run in output_dir from its last checkpoint"),
        Flag("resume_from_checkpoint", FLAG, None, "the same"),
        Flag("set", LIST, None, "KEY=VALUE: any key of the config, see grpo_mega/config/run.py; may be repeated"),
    ),
}
FLAGS: Mapping[str, Flag] = {flag.name: flag for flags in GROUPS.values() for flag in flags}
ALIASES: Mapping[str, str] = {"torch_dtype": "dtype"}
REQUIRED = ("model_name_or_path", "dataset_name", "output_dir")

_VLLM = "samples come from the trainer's own engine, or from SGLang's servers by --set rollout.engine=sglang; leave it out"
_ALL_WEIGHTS = "all weights are trained; leave it out"
_LAYOUT = "models are sharded by --tensor_parallel and --pipeline_parallel; leave it out"
_UPLOAD = "nothing is uploaded; leave it out, and upload output_dir/hf afterwards"
# Any flag with the prefix vllm_ is refused, too.
REFUSED: Mapping[str, str] = {
    "use_vllm": _VLLM,
    "fp16": "there is no training in float16; use --bf16 true or --dtype float32",
    "use_peft": _ALL_WEIGHTS,
    "lora_r": _ALL_WEIGHTS,
    "lora_alpha": _ALL_WEIGHTS,
    "lora_target_modules": _ALL_WEIGHTS,
    "load_in_4bit": _ALL_WEIGHTS,
    "load_in_8bit": _ALL_WEIGHTS,
    "deepspeed": _LAYOUT,
    "fsdp": _LAYOUT,
    "fsdp_config": _LAYOUT,
    "push_to_hub": _UPLOAD,
    "hub_model_id": _UPLOAD,
    "config": "flags are not read from a file; write a config like examples/gsm8k.yaml for grpo-mega train, or give the flags",
    "min_p": "sampling has temperature, top_p and top_k; leave it out",
    "repetition_penalty": "the policy is trained on the distribution that it samples from; leave it out",
    "top_entropy_quantile": "all tokens of a response contribute to the loss; leave it out",
    "trust_remote_code": "no code of a model is run; leave it out",
}
HARMLESS = {"false", "none", "no"}  # values that turn a refused flag off
HARMLESS_OF = {"repetition_penalty": {"1", "1.0"}, "top_entropy_quantile": {"1", "1.0"}, "min_p": {"0", "0.0"}}

_CONSOLE = "every step is printed, and written to output_dir/metrics.jsonl"
_ATTENTION = "attention is Megatron's or Transformer Engine's"
NOTED: Mapping[str, str] = {
    "logging_steps": _CONSOLE,
    "logging_first_step": _CONSOLE,
    "logging_strategy": _CONSOLE,
    "log_level": _CONSOLE,
    "log_completions": "samples of every step are in output_dir/samples.jsonl",
    "attn_implementation": _ATTENTION,
    "gradient_checkpointing_kwargs": "Megatron decides how activations are recomputed",
    "use_liger_kernel": "log-probs never need all logits here",
    "remove_unused_columns": "reward functions get all columns of a row",
    "dataset_streaming": "data sets are read once, at the start",
    "dataloader_num_workers": "prompts are tokenised once, at the start",
    "per_device_eval_batch_size": "an engine decodes up to rollout.max_concurrent sequences at once",
    "do_train": "this command trains",
    "do_eval": "held-out prompts are evaluated before the first and after the last step",
    "optim": "the optimizer is AdamW",
    "run_name": "a run is named by its folder",
}

Values = dict[str, Any]  # keyed by flag; the kind sets the type: bool, int, float, str or list[str]
_TRUE, _FALSE = {"true", "yes", "1"}, {"false", "no", "0"}
_BATCH_TEXT = """\
A rollout has per_device_train_batch_size x steps_per_generation x data-parallel ranks samples: that many / num_generations
prompts. An optimizer step has per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks samples. They
are packed: a micro-batch holds as many tokens as per_device_train_batch_size samples of maximum length. If none of these
flags is given, a step has the config's 32 prompts and one optimizer step. All defaults are this trainer's, not TRL's."""


def parse(arguments: Sequence[str]) -> tuple[Values, list[str]]:
    """Return the values, and a note for each flag that has no effect here."""
    values: Values = {}
    notes: list[str] = []
    for name, given in _split(arguments):
        if name in FLAGS:
            value = _value(name, given)
            if name in values and name != "set":
                raise ConfigError(f"--{name} is given twice; give it once")
            values[name] = [*values.get(name, []), *value] if name == "set" else value
        elif name in NOTED:
            notes.append(f"--{name} has no effect: {NOTED[name]}")
        elif name in REFUSED or name.startswith("vllm_"):
            if " ".join(given).lower() not in HARMLESS | HARMLESS_OF.get(name, set()):
                raise ConfigError(f"{' '.join([f'--{name}', *given])}: {REFUSED.get(name, REFUSED['use_vllm'])}")
        else:
            raise ConfigError(f"unknown flag --{name}; {_nearest(name)}")
    for name in REQUIRED:
        if name not in values:
            raise ConfigError(f"--{name} is missing: {FLAGS[name].help.removesuffix(' (required)')}")
    return values, notes


def help_text() -> str:
    """Return the text of --help: all flags by group, with the keys that they set."""
    lines = ["usage: python -m grpo_mega.grpo --model_name_or_path MODEL --dataset_name DATA --output_dir DIR [flags]", ""]
    for group, flags in GROUPS.items():
        lines.append(f"{group}:")
        for flag in flags:
            key = f"[{flag.key}]" if flag.key else ""
            lines.append(f"  --{flag.name:28} {' '.join(part for part in (flag.help, key) if part)}")
        lines.append("")
    return "\n".join([*lines, _BATCH_TEXT])


def _split(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (name, values) of each flag, with underscores in names."""
    flags: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, separator, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            flags.append((ALIASES.get(name, name), [value] if separator else []))
        elif flags:
            flags[-1][1].append(argument)
        else:
            raise ConfigError(
                f"{argument!r} stands before any flag; flags begin with --, for example --dataset_name {argument}"
            )
    return flags


def _value(name: str, given: list[str]) -> Any:
    kind = FLAGS[name].kind
    if kind == FLAG and not given:
        return True
    if not given:
        raise ConfigError(f"--{name} needs {kind}; give it, or leave the flag out")
    if kind == LIST:
        return given
    if len(given) > 1:
        raise ConfigError(f"--{name} takes one value, but has {len(given)}: {' '.join(given)}; quote it if it is one")
    (text,) = given
    if kind == TEXT:
        return text
    readers: dict[str, Callable[[str], Any]] = {FLAG: _as_bool, WHOLE: int, NUMBER: float}
    try:
        return readers[kind](text)
    except ValueError:
        raise ConfigError(f"--{name} {text}: {text!r} is not {kind}") from None


def _as_bool(text: str) -> bool:
    if text.lower() not in _TRUE | _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.6)
    if close:
        return f"did you mean --{close[0]}? For any key of the config there is --set KEY=VALUE"
    return "see --help; for any key of the config there is --set KEY=VALUE"
