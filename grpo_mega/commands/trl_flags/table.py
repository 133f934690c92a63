"""Every flag of `python -m grpo_mega.grpo`: its name, what its value is, and the key of the config that it sets.

Where `key` is None, values.py or sources.py says what the flag does. A flag that is not given leaves the config's own default.
REFUSED are flags of TRL for what this trainer does in another way or not at all, each with the remedy; NOTED are those that
change nothing here, each with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
        Flag("dtype", TEXT, None, "bfloat16, float32, or auto: what the model's config.json says"),
        Flag("bf16", FLAG, None, "true: --dtype bfloat16; false: --dtype float32"),
        Flag("dataset_name", TEXT, None, "a file, a folder, or a name on the hub (required)"),
        Flag("dataset_config", TEXT, None, "configuration of a hub's data set"),
        Flag("dataset_train_split", TEXT, None, "split to train on; default: train"),
        Flag("dataset_test_split", TEXT, None, "split to evaluate on; default: none, or test with --eval_steps"),
        Flag("dataset_prompt_column", TEXT, "data.prompt_column", "default: prompt, problem or question, what there is"),
        Flag("dataset_answer_column", TEXT, "data.answer_column", "default: answer, else solution"),
        Flag("system_prompt", TEXT, "data.system_prompt", "put before every prompt"),
        Flag("max_prompt_length", WHOLE, "data.max_prompt_length", "tokens; longer prompts are dropped"),
        Flag("shuffle_dataset", FLAG, "data.shuffle", ""),
    ),
    "rewards": (
        Flag("reward_funcs", LIST, None, "accuracy, format, ..., or dotted paths of your own functions"),
        Flag("reward_weights", LIST, None, "one for each function; default: 1"),
        Flag("scale_rewards", TEXT, None, "group: divide by the group's deviation; none: do not (Dr. GRPO)"),
    ),
    "sampling": (
        Flag("num_generations", WHOLE, "algorithm.group_size", "samples of a prompt"),
        Flag("max_completion_length", WHOLE, "rollout.max_response_length", "tokens"),
        Flag("temperature", NUMBER, "rollout.temperature", ""),
        Flag("top_p", NUMBER, "rollout.top_p", ""),
        Flag("top_k", WHOLE, "rollout.top_k", "0: off"),
    ),
    "batch": (
        Flag("per_device_train_batch_size", WHOLE, None, "samples of a data-parallel rank in one pass; see below"),
        Flag("gradient_accumulation_steps", WHOLE, None, "passes of an optimizer step; default: 1"),
        Flag("steps_per_generation", WHOLE, None, "passes of a rollout; default: gradient_accumulation_steps"),
        Flag("generation_batch_size", WHOLE, None, "samples of a rollout, in place of steps_per_generation"),
        Flag("num_iterations", WHOLE, "batch.epochs", "times that a rollout is trained on"),
        Flag("max_steps", WHOLE, None, "optimizer steps; wins over num_train_epochs"),
        Flag("num_train_epochs", NUMBER, None, "passes over the data; default: 1"),
    ),
    "loss": (
        Flag("loss_type", TEXT, None, "grpo, dapo, dr_grpo, bnpo, cispo or sapo, with TRL's meaning: the loss alone"),
        Flag("importance_sampling_level", TEXT, None, "token, or sequence (GSPO)"),
        Flag("beta", NUMBER, "algorithm.kl_beta", "weight of the KL penalty"),
        Flag("use_bias_correction_kl", FLAG, None, "weigh the KL penalty by the ratio"),
        Flag("epsilon", NUMBER, "algorithm.ratio_clip_eps", "how far a ratio may go from 1"),
        Flag("epsilon_high", NUMBER, None, "likewise upwards; for cispo the greatest ratio itself"),
        Flag("delta", NUMBER, None, "the greatest ratio where the advantage is negative"),
        Flag("sapo_temperature_pos", NUMBER, "algorithm.sapo_tau_positive", ""),
        Flag("sapo_temperature_neg", NUMBER, "algorithm.sapo_tau_negative", ""),
        Flag("entropy_coef", NUMBER, None, "weight of an entropy bonus"),
        Flag("mask_truncated_completions", FLAG, "algorithm.overlong_filter", "responses cut off do not train"),
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
        Flag("gradient_checkpointing", FLAG, None, "compute activations again in the backward pass"),
    ),
    "layout": (
        Flag("tensor_parallel", WHOLE, "layout.tp", "ranks that share each layer"),
        Flag("pipeline_parallel", WHOLE, "layout.pp", "ranks that share the layers"),
        Flag("data_parallel", WHOLE, "layout.dp", "replicas; under torchrun what is left of its ranks"),
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
        Flag("num_completions_to_print", WHOLE, "log.samples_per_step", "samples of a step in output_dir/samples.jsonl"),
        Flag("resume", FLAG, None, "go on with the run in output_dir from its last checkpoint"),
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
# Besides these, any flag that begins with vllm_.
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
    "sync_ref_model": "the reference stays the start model; leave it out",
    "top_entropy_quantile": "all tokens of a response train; leave it out",
    "trust_remote_code": "no code of a model is run; leave it out",
}
HARMLESS = {"false", "none", "no"}  # values at which a refused flag asks for nothing
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
    "gradient_checkpointing_kwargs": "how activations are computed again is Megatron's matter",
    "use_liger_kernel": "log-probs never need all logits here",
    "remove_unused_columns": "reward functions get all columns of a row",
    "dataset_streaming": "data sets are read once, at the start",
    "dataloader_num_workers": "prompts are tokenised once, at the start",
    "per_device_eval_batch_size": "an engine decodes as many sequences at once as rollout.max_concurrent says",
    "do_train": "this command trains",
    "do_eval": "what is held out is answered before the first and after the last step",
    "optim": "the optimizer is AdamW",
    "run_name": "a run has the name of its folder",
}
