"""`grpo-mega grpo`, or `python -m grpo_mega.grpo`: train with the flags of TRL and open-r1.

The flags become the config that `grpo-mega train` would read from a file. TRL counts optimizer steps and batches of
samples. The config counts rollouts (`steps`), prompts per rollout and optimizer steps per rollout.

trl_flags.yaml lists the flags, and argparse reads them. If a flag has no config key, code here handles it. A missing
flag leaves the config's default. Underscores and dashes are the same in names. A flag of true or false may stand alone.
Errors are ConfigError in one line.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mega import config as configs
from grpo_mega.cli.commands.options import TrlOptions
from grpo_mega.cli.commands.train import print_notes, reward_override, train
from grpo_mega.config import Config
from grpo_mega.data.rows import read_rows
from grpo_mega.distributed.launch import current_rank
from grpo_mega.errors import ConfigError
from grpo_mega.http_client import use_cache_if_unreachable
from grpo_mega.paths import read_json, user_path
from grpo_mega.text import nearest
from grpo_mega.yaml_text import parse_yaml

Keys = dict[str, Any]  # values of the config by dotted key, before validation
_FORMATS = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"[\w][\w.-]*(?:/[\w][\w.-]*)?")
# All files of a checkpoint that may be read: no weights in other formats, and no code.
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_PER_DEVICE_DEFAULT = 8  # TRL's default
_BATCH_FLAGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)


def run(options: TrlOptions) -> int:
    """Train with the flags after "grpo" on the command line. Return the exit code."""
    config, resume, notes = read_config(options.argv[1:], os.environ)
    if not current_rank():
        print_notes(notes)
    return train(config, resume, ["grpo-mega", *options.argv])


def read_config(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[Config, bool, list[str]]:
    """Return the flags' config, whether to resume, and notes for the user. Download the model if necessary.

    Under torchrun, the number of data-parallel ranks follows from WORLD_SIZE in `environ`. Raise ConfigError if flags
    contradict each other or this trainer does not support them.
    """
    values, notes = parse_flags(arguments)
    keys: Keys = {}
    for name, flag in FLAGS.items():
        if name in values:
            keys |= flag.sets.get(str(values[name]).lower(), {})
            keys |= {} if flag.key is None else {flag.key: values[name]}
    _model_and_data(values, keys)
    _algorithm(values, keys)
    dp_size, world_size = values.get("data_parallel", 1), environ.get("WORLD_SIZE", "")
    if "data_parallel" not in values and world_size.isdecimal():
        model_ranks = max(1, values.get("tensor_parallel", 1)) * max(1, values.get("pipeline_parallel", 1))
        dp_size = int(world_size) // model_ranks
    _batch(values, keys, max(1, dp_size))
    num_updates = _get(keys, "batch.mini_batches") * _get(keys, "batch.epochs")  # optimizer steps per rollout
    if _is_on(values, "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"):  # with TRL's defaults
        keys["algorithm.ref_model_sync_steps"] = math.ceil(values.get("ref_model_sync_steps", 512) / num_updates)
        keys["algorithm.ref_model_mixup_alpha"] = values.get("ref_model_mixup_alpha", 0.6)
    if values.get("max_steps", -1) > 0:
        keys["steps"] = math.ceil(values["max_steps"] / num_updates)
    else:
        epochs = values.get("num_train_epochs", 1.0)
        if not epochs > 0:
            raise ConfigError(f"--num_train_epochs {epochs:g} is not above 0; raise it, or give --max_steps")
        num_prompts = sum(1 for _ in read_rows(keys["data.train"]))
        keys["steps"] = max(1, math.floor(epochs * num_prompts / _get(keys, "batch.prompts_per_step")))
    _optimizer(values, keys, num_updates)
    _intervals(values, keys, num_updates)
    raw = configs.nested(keys)
    rewards = reward_override(values.get("reward_funcs"), values.get("reward_weights"))
    for override in [*rewards, *values.get("set", [])]:
        configs.apply_override(raw, override)
    config = configs.validate(raw)  # raises before anything is downloaded
    data = config.data
    if _evaluates(values) and not (data.heldout_sources or data.heldout_size or data.heldout_fraction):
        raise ConfigError(
            f"--eval_steps {values['eval_steps']} has nothing to evaluate on; name --dataset_test_split, or set"
            " data.heldout or data.heldout_size by --set"
        )
    model = find_model(str(config.model.path), values.get("model_revision"))
    raw["model"]["path"] = str(model)
    if values.get("dtype") == "auto" and "dtype" not in raw["model"]:
        dtype = None
        with suppress(OSError, ValueError, AttributeError):  # the checks report the problem with the file
            fields = read_json(model / "config.json")
            dtype = fields.get("dtype") or fields.get("torch_dtype")
        raw["model"]["dtype"] = "float32" if dtype == "float32" else "bfloat16"
    return configs.validate(raw), values.get("resume", False), notes


def find_model(name: str, revision: str | None) -> Path:
    """Return the folder of a checkpoint: a local one, or one of the hub, downloaded once into its cache. Raise
    ConfigError.
    """
    if Path(name).is_dir():
        if revision is not None:
            raise ConfigError(
                f"--model_revision {revision} is for models of the hub, but {name} is a folder; leave it out"
            )
        return Path(name)
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"--model_name_or_path {name} is no folder; name one, or a model of the Hugging Face hub (owner/name)"
        )
    use_cache_if_unreachable()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_MODEL_FILES))
    except Exception as error:  # raised by the hub's client, the network or the disk
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConfigError(
            f"--model_name_or_path {name} is neither a local folder nor available from the Hugging Face hub ({reason});"
            " check name, revision and network, or download it elsewhere and name its folder"
        ) from None


def find_data(name: str, config: str | None, split: str | None) -> str:
    """Return the value of data.train for a file, a folder or a name on the hub. Raise ConfigError."""
    path = user_path(name)
    is_local = path.exists() or path.suffix in _FORMATS or not _HUB_NAME.fullmatch(name.removeprefix("hub:"))
    if not is_local:
        return f"hub:{name.removeprefix('hub:')}{f':{config}' if config else ''}{f'@{split}' if split else ''}"
    if config is not None:
        raise ConfigError(f"--dataset_config {config} is for datasets of the hub, but {name} is a path; leave it out")
    if split is None:
        return str(path)
    if not path.is_dir():
        raise ConfigError(
            f"split {split!r} of {name}: a file has no splits; leave it out, or set data.heldout by --set"
        )
    return f"{path}@{split}"


def _evaluates(values: Values) -> bool:
    return "eval_steps" in values and values.get("eval_strategy") != "no"


def _get(keys: Keys, key: str) -> Any:
    """Return the value of a key, or its default."""
    section, _, name = key.partition(".")
    schema: Any = Config.model_fields[section].annotation
    return keys.get(key, schema.model_fields[name].default)


def _model_and_data(values: Values, keys: Keys) -> None:
    keys["model.path"] = values["model_name_or_path"]
    dtype = values.get("dtype", "auto")
    if dtype != "auto" and keys.setdefault("model.dtype", dtype) != dtype:
        raise ConfigError(f"--bf16 {str(values['bf16']).lower()} contradicts --dtype {dtype}; give one of them")
    if _is_on(values, "use_peft", "lora_r", "lora_alpha", "lora_target_modules"):
        targets = values.get("lora_target_modules", ["q_proj", "v_proj"])
        keys["model.lora.rank"], keys["model.lora.alpha"] = values.get("lora_r", 16), values.get("lora_alpha", 32)
        keys["model.lora.targets"] = [name.removesuffix("_proj") for name in targets]
    name, config = values["dataset_name"], values.get("dataset_config")
    keys["data.train"] = train = find_data(name, config, values.get("dataset_train_split"))
    has_splits = train.startswith("hub:") or user_path(name).is_dir()
    split = values.get("dataset_test_split", "test" if _evaluates(values) and has_splits else None)
    if split is not None:
        keys["data.heldout"] = find_data(name, config, split)


def _algorithm(values: Values, keys: Keys) -> None:
    name = values.get("loss_type")
    objectives = {
        f"loss_type {name}": name in ("cispo", "sapo"),
        "importance_sampling_level sequence": values.get("importance_sampling_level") == "sequence",
        f"delta {values.get('delta')}": "delta" in values,
    }
    first, *others = [flag for flag, is_given in objectives.items() if is_given] or [""]
    if others:
        raise ConfigError(f"--{others[0]} cannot be combined with --{first}; leave one out")
    if "epsilon_high" in values:
        # cispo limits the ratio itself, not its distance from 1
        keys["algorithm.ratio_clip_eps_high"] = values["epsilon_high"] - (name == "cispo")
        if name == "cispo" and values["epsilon_high"] <= 1:
            raise ConfigError(
                f"--epsilon_high {values['epsilon_high']:g} is the largest ratio of --loss_type cispo; "
                "give one above 1, for example 5"
            )
    if "delta" in values:
        keys |= {"algorithm.loss_type": "dual_clip", "algorithm.ratio_clip_c": values["delta"]}
    if values.get("entropy_coef"):
        keys |= {"algorithm.entropy_bonus": values["entropy_coef"], "algorithm.calculate_entropy": True}


def _batch(values: Values, keys: Keys, dp_size: int) -> None:
    """Set prompts per rollout with TRL's arithmetic: passes of per_device_train_batch_size samples per data-parallel
    rank.
    """
    given = [name for name in _BATCH_FLAGS if name in values]
    longest_sample = _get(keys, "data.max_prompt_length") + _get(keys, "rollout.max_response_length")
    for name in given:
        if values[name] < 1:
            raise ConfigError(f"--{name} {values[name]} is not above 0; raise it")
    if not given:
        if longest_sample > _get(keys, "batch.tokens_per_micro_batch"):
            keys["batch.tokens_per_micro_batch"] = longest_sample
        return
    _refuse_both(values, "steps_per_generation", "generation_batch_size")
    per_device = values.get("per_device_train_batch_size", _PER_DEVICE_DEFAULT)
    accumulation = values.get("gradient_accumulation_steps", 1)
    per_pass = per_device * dp_size
    num_samples = values.get("generation_batch_size", per_pass * values.get("steps_per_generation", accumulation))
    passes, rest = divmod(num_samples, per_pass)
    if rest:
        raise ConfigError(
            f"--generation_batch_size {num_samples} is not a multiple of per_device_train_batch_size={per_device} x"
            f" {dp_size} data-parallel ranks; use {passes * per_pass or per_pass} or {(passes + 1) * per_pass}"
        )
    mini_batches, rest = divmod(passes, accumulation)
    if rest:
        raise ConfigError(
            f"--gradient_accumulation_steps {accumulation} does not divide the {passes} passes of a rollout "
            f"(steps_per_generation); raise these to {(mini_batches + 1) * accumulation}"
        )
    group_size = _get(keys, "algorithm.group_size")
    num_prompts, rest = divmod(num_samples, max(1, group_size))
    if rest or num_prompts % mini_batches:
        fitting = math.lcm(group_size * mini_batches, passes * dp_size) // (passes * dp_size)
        raise ConfigError(
            f"a rollout of per_device_train_batch_size={per_device} x {passes} passes x {dp_size} data-parallel ranks ="
            f" {num_samples} samples is not {mini_batches} times whole groups of num_generations={group_size}; use"
            f" --per_device_train_batch_size {fitting} or a multiple, or change --num_generations"
        )
    keys |= {"batch.prompts_per_step": num_prompts, "batch.mini_batches": mini_batches}
    keys["batch.tokens_per_micro_batch"] = per_device * longest_sample


def _refuse_both(values: Values, first: str, second: str) -> None:
    if first in values and second in values:
        raise ConfigError(f"--{first} and --{second} mean the same; give one of them")


def _is_on(values: Values, switch: str, *names: str) -> bool:
    """Return True if the switch is on. Raise ConfigError if it is off and a flag needs it."""
    is_on = bool(values.get(switch))
    for name in names:
        if name in values and not is_on:
            raise ConfigError(f"--{name} {values[name]} needs --{switch} true; give it, or leave {name} out")
    return is_on


def _optimizer(values: Values, keys: Keys, num_updates: int) -> None:
    _refuse_both(values, "warmup_steps", "warmup_ratio")
    warmup = values.get("warmup_ratio", values.get("warmup_steps"))
    if warmup is not None:
        if "warmup_ratio" in values and not 0 <= warmup <= 1:
            raise ConfigError(
                f"--warmup_ratio {warmup:g} is not between 0 and 1; for a number of steps use --warmup_steps"
            )
        is_share = "warmup_ratio" in values or 0 < warmup < 1
        keys["optimizer.warmup_steps"] = math.ceil(warmup * keys["steps"] * num_updates) if is_share else int(warmup)
    first, second = _get(keys, "optimizer.betas")
    keys["optimizer.betas"] = [values.get("adam_beta1", first), values.get("adam_beta2", second)]


def _intervals(values: Values, keys: Keys, num_updates: int) -> None:
    """Set the intervals of checkpoints and evaluations, and the run's log."""
    for event, key in (("save", "checkpoint.interval"), ("eval", "eval.interval")):
        strategy, interval = values.get(f"{event}_strategy"), values.get(f"{event}_steps")
        if strategy == "steps" and interval is None:
            raise ConfigError(f"--{event}_strategy steps needs --{event}_steps; give it")
        if interval is not None and strategy != "no":
            keys[key] = math.ceil(interval / num_updates)
    if "report_to" in values:
        for name in values["report_to"]:
            if name not in ("wandb", "tensorboard", "none", "all"):
                raise ConfigError(
                    f"--report_to {name} is not written; use wandb, tensorboard or none; output_dir/metrics.jsonl has"
                    " all metrics"
                )
        keys["log.wandb"] = not {"wandb", "all"}.isdisjoint(values["report_to"])
        keys["log.tensorboard"] = "tensorboard" in values["report_to"]


@dataclass(frozen=True)
class Flag:
    name: str
    kind: str | Sequence[str] = "text"  # text, bool, int, float, list (of texts), or the words to choose from
    key: str | None = None  # config key with the same value
    help: str = ""
    aliases: Sequence[str] = ()
    sets: Mapping[str, Keys] = field(default_factory=dict)  # the keys that each value sets


_TABLE = parse_yaml(Path(__file__).with_name("trl_flags.yaml").read_text(encoding="utf-8"))
GROUPS: Mapping[str, list[Flag]] = {
    group: [Flag(name, **row) for name, row in rows.items()] for group, rows in _TABLE["flags"].items()
}
FLAGS: Mapping[str, Flag] = {flag.name: flag for flags in GROUPS.values() for flag in flags}
NOTED: Mapping[str, str] = _TABLE["noted"]
REFUSED: Mapping[str, str] = _TABLE["refused"]
HARMLESS: Mapping[str, list[str]] = _TABLE["harmless"]
REQUIRED = ("model_name_or_path", "dataset_name", "output_dir")
KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "list": "one value or more"}
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
READERS: Mapping[str, Callable[[str], Any]] = {
    "text": str,
    "bool": lambda text: BOOLEANS[text.lower()],
    "int": int,
    "float": float,
}
Values = dict[str, Any]  # keyed by flag; bool, int, float, str or list[str]


def parse_flags(arguments: Sequence[str]) -> tuple[Values, list[str]]:
    """Return the values, and a note for each flag that has no effect here."""
    arguments = [re.sub(r"^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), text) for text in arguments]
    parser = make_parser()
    for name in {text.partition("=")[0] for text in arguments if text.startswith("--vllm_")}:
        parser.add_argument(name, nargs="*", action="append")
    parsed, rest = parser.parse_known_args(arguments)
    if rest:
        if not rest[0].startswith("--"):
            raise ConfigError(f"{rest[0]!r} stands before any flag; give it one, like --dataset_name {rest[0]}")
        name = rest[0].partition("=")[0]
        hint = nearest(name, [f"--{known}" for known in FLAGS])
        raise ConfigError(f"unknown flag {name}; {hint}see --help, or set any key of the config by --set KEY=VALUE")
    given: dict[str, list[list[str]]] = vars(parsed)
    for name in [name for name in given if name not in FLAGS and name not in NOTED]:
        value = " ".join(given[name][-1])
        if value.lower() not in ("false", "none", "no", *HARMLESS.get(name, ())):
            raise ConfigError(f"{f'--{name} {value}'.strip()}: {REFUSED.get(name, REFUSED['use_vllm'])}")
    for name in REQUIRED:
        if name not in given:
            raise ConfigError(f"--{name} is missing: {FLAGS[name].help.removesuffix(' (required)')}")
    notes = [f"--{name} has no effect: {NOTED[name]}" for name in given if name in NOTED]
    return {name: _value(FLAGS[name], given[name]) for name in given if name in FLAGS}, notes


def make_parser() -> argparse.ArgumentParser:
    """Return a parser that collects the texts of each flag."""

    class Format(argparse.RawDescriptionHelpFormatter):
        def __init__(self, prog: str) -> None:
            super().__init__(prog, max_help_position=34, width=128)

        def _format_action_invocation(self, action: argparse.Action) -> str:
            return ", ".join(action.option_strings)

    parser = argparse.ArgumentParser(
        usage="grpo-mega grpo --model_name_or_path MODEL --dataset_name DATA --output_dir DIR [flags]",
        epilog=_TABLE["epilog"],
        formatter_class=Format,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            choices = "" if isinstance(flag.kind, str) else ", ".join(flag.kind)
            text = " ".join(filter(None, ["; ".join(filter(None, [choices, flag.help])), flag.key and f"[{flag.key}]"]))
            names = [f"--{name}" for name in (flag.name, *flag.aliases)]
            group.add_argument(*names, nargs="*", action="append", help=text)
    for name in (*NOTED, *REFUSED):
        parser.add_argument(f"--{name}", nargs="*", action="append", help=argparse.SUPPRESS)
    return parser


def _value(flag: Flag, given: list[list[str]]) -> Any:
    texts = [text for one in given for text in one]
    kind = KINDS.get(str(flag.kind), "one value")
    if len(given) > 1 and flag.name != "set":
        raise ConfigError(f"--{flag.name} is given twice; give it once")
    if not texts and flag.kind == "bool":
        return True
    if not texts:
        raise ConfigError(f"--{flag.name} needs {kind}; give it, or leave the flag out")
    if flag.kind == "list":
        return texts
    if len(texts) > 1:
        shown = " ".join(texts)
        raise ConfigError(f"--{flag.name} takes one value, but has {len(texts)}: {shown}; quote it if it is one")
    (text,) = texts
    if not isinstance(flag.kind, str):
        if text.lower() not in flag.kind:
            raise ConfigError(f"--{flag.name} {text} is not among {', '.join(flag.kind)}; use one of them")
        return text.lower()
    try:
        return READERS[flag.kind](text)
    except (KeyError, ValueError):
        raise ConfigError(f"--{flag.name} {text}: {text!r} is not {kind}") from None
