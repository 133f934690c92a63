"""The options of commands, as dataclasses that define flags, types, defaults and help for argparse. Imports nothing
heavy.
"""

# ruff: noqa: RUF009  # `flag`, `switch` and `positional` return fields, as dataclasses.field does

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from grpo_mega.errors import ConfigError
from grpo_mega.paths import hub_hint, user_path
from grpo_mega.text import nearest

Options = TypeVar("Options")
TYPES = {"int": int, "float": float, "str": str, "Path": user_path}


def positional(help: str, metavar: str, *, takes: str | None = None, **default: Any) -> Any:
    """Return the field of an argument without a flag. With `takes`, what it takes in words, its path must exist."""
    return field(**default, metadata={"help": help, "metavar": metavar, "takes": takes})


def flag(help: str, metavar: str | None = None, default: Any = None, *, names: str = "", **settings: Any) -> Any:
    """Return the field of a flag. `names` are its spellings, if they differ from the field's name."""
    return field(default=default, metadata={"help": help, "metavar": metavar, "names": names, **settings})


def switch(help: str, *, names: str = "") -> Any:
    """Return the field of a flag without a value, which is False unless it is given."""
    return flag(help, default=False, names=names)


def overrides() -> Any:
    text = (
        "overrides a value, for example --set optimizer.lr=1e-6, and keeps text and quotes as they are; may be repeated"
    )
    return flag(text, "KEY=VALUE", (), names="--set", action="append")


@dataclass(frozen=True)
class ConfigOptions:
    config: Path = positional("YAML file; see examples/*.yaml", "CONFIG", takes="a YAML file; see examples/*.yaml")
    overrides: Sequence[str] = overrides()


@dataclass(frozen=True)
class SftOptions(ConfigOptions):
    resume: bool = switch("continue the run in run_dir from its last checkpoint")
    argv: Sequence[str] = ()  # the whole command line


@dataclass(frozen=True)
class RewardOptions(ConfigOptions):
    reward_funcs: Sequence[str] | None = flag(
        "reward functions in place of the file's, each built in, or your own as module.function or file.py:function;"
        " options that the file gives a function stay",
        "NAME",
        names="--reward-funcs --reward_funcs",
    )
    reward_weights: Sequence[str] | None = flag(
        "their weights, in the same order; 1 by default", "W", names="--reward-weights --reward_weights"
    )


@dataclass(frozen=True)
class TrainOptions(RewardOptions, SftOptions):
    profile: str | None = flag("steps to trace into RUN_DIR/trace, like 3 or 3-4", "STEPS")


@dataclass(frozen=True)
class InitOptions:
    model: Path = positional("folder of a Hugging Face checkpoint", "MODEL")
    data: str = positional("a file, a folder, or hub:owner/name; see examples/README.md", "DATA")
    out: Path = flag("file to write, which must not exist; default: config.yaml", "FILE", Path("config.yaml"))
    prompt_column: str | None = flag("column of the prompts; default: guessed", "NAME")
    answer_column: str | None = flag("column of the gold answers; default: guessed", "NAME")
    gpu: str | None = flag("GPU to train on; default: this machine's", choices=("a100", "h100", "h200", "b200"))
    num_gpus: int | None = flag("number of GPUs; default: this machine's, or a node's with --gpu", "N")
    gpus_per_node: int = flag("default: 8", "N", 8)


@dataclass(frozen=True)
class TrlOptions:
    argv: Sequence[str] = ()


@dataclass(frozen=True)
class CheckOptions(ConfigOptions):
    layouts: str = flag(
        'layouts to compare, for example "tp=2 pp=2 tp=2,pp=2,sequence_parallel=true"', '"LAYOUT ..."', required=True
    )


@dataclass(frozen=True)
class RunOptions:
    run_dir: Path = positional("the run_dir of its config", "RUN_DIR", takes="the run_dir of a run's config")


@dataclass(frozen=True)
class ReportOptions(RunOptions):
    watch: bool = switch("serve a live page on loopback until Ctrl-C, and write no file")
    port: int | None = flag("port of the live page; default: any free one", "N")


@dataclass(frozen=True)
class ExportOptions(RunOptions):
    out: Path = positional("folder to write, which must not exist", "OUT")
    step: int | None = flag("the checkpoint after this step; default: the latest")
    is_merged: bool = switch(
        "with model.lora, write the base with the adapter merged into it; default: a PEFT folder",
        names="--merged",
    )


@dataclass(frozen=True)
class ConvertOptions:
    source: Path | None = positional(
        "Hugging Face folder, Megatron checkpoint, or a run's folder; the direction follows from it",
        "SOURCE",
        default=None,
    )
    out: Path | None = positional("folder to write, which must not exist", "OUT", default=None)
    dtype: str | None = flag("cast all weights to float32, bfloat16 or float16; default: each keeps its dtype")
    workers: int = flag("tensors to convert at once; default: 2", "N", 2)
    max_shard_size: str | None = flag("of a Hugging Face folder's files, like 500MiB; default: 5GB", "SIZE")
    config: Path | None = flag(
        "folder with config.json and tokenizer, for a Megatron checkpoint without; with --dry, in place of SOURCE",
        "PATH",
    )
    dry: bool = switch("write nothing, and list what each rank of --layout would hold; needs no weights")
    layout: str | None = flag("with --dry, for example tp=4,pp=4,ep=2; default: tp=1", "LAYOUT")


@dataclass(frozen=True)
class VerifyOptions:
    a: Path = positional("checkpoint of any kind", "A")
    b: Path = positional("checkpoint to compare it with", "B")
    logits: bool = flag(
        "also compare the outputs of every layer, if the model fits into memory",
        default=True,
        action=argparse.BooleanOptionalAction,
    )
    workers: int = flag("tensors to compare at once; default: 2", "N", 2)
    config_a: Path | None = flag("folder with config.json, if A has none", "FOLDER")
    config_b: Path | None = flag("folder with config.json, if B has none", "FOLDER")


@dataclass(frozen=True)
class InspectOptions:
    path: Path = positional("Hugging Face folder, Megatron checkpoint, or a run's folder", "PATH")
    config: Path | None = flag("folder with config.json, for a checkpoint without one", "FOLDER")
    is_json: bool = switch("print JSON", names="--json")


@dataclass(frozen=True)
class KeyOptions:
    key: str | None = positional("a key or a section, like rollout.top_p; default: all keys", "KEY", default=None)
    is_markdown: bool = switch("print them as a table in Markdown", names="--markdown")


@dataclass(frozen=True)
class NoOptions:
    pass


@dataclass(frozen=True)
class EvalOptions:
    """The options of eval. None means: as in the config."""

    target: Path = positional(
        "a run's folder: its checkpoint, or its hf; a config: its model; a model's folder",
        "RUN_DIR_OR_MODEL",
        takes="a run's folder, a config file, or a model's folder",
    )
    overrides: Sequence[str] = overrides()
    step: int | None = flag("the run's checkpoint after this step; default: the latest")
    model: Path | None = flag("checkpoint folder to evaluate in place of the run's", "FOLDER")
    data: str | None = flag("dataset in place of the config's held-out prompts", "PATH")
    prompt: str | None = flag("text of a user message to answer", "TEXT")
    answer: str | None = flag("gold answer of --prompt, for its rewards", "TEXT")
    train_set: bool = switch("answer data.train; --out of eval is then a file for data.pass_rates")
    prompts: int | None = flag("only the first N of each set", "N")
    samples: int | None = flag("sampled responses per prompt; default: eval.samples", "N")
    ks: Sequence[int] | None = flag("the K of pass@K and majority@K; default: powers of two up to N", "K", names="--k")
    temperature: float | None = flag("of the sampled responses; default: eval.temperature", "T")
    top_p: float | None = flag("of the sampled responses; default: eval.top_p", "P")
    greedy: bool | None = flag(
        "one greedy response per prompt; default: eval.greedy", action=argparse.BooleanOptionalAction
    )
    engine: str | None = flag("default: the run's, or embedded", choices=("embedded", "sglang"))
    max_response_length: int | None = flag("default: rollout.max_response_length, or 512 without a run", "TOKENS")
    out: Path | None = flag("JSON lines to write, one per prompt; must not exist", "FILE")

    shows: ClassVar[bool] = False  # True: the responses are printed


@dataclass(frozen=True)
class SampleOptions(EvalOptions):
    samples: int | None = flag("responses per prompt; default: 8", "N", 8, names="--n --samples")
    temperature: float | None = flag("0 is one greedy response; default: eval.temperature", "T")
    greedy: bool | None = flag(
        "also one greedy response per prompt", default=False, action=argparse.BooleanOptionalAction
    )
    out: Path | None = flag("JSON lines to write, one per response with its log-probs; must not exist", "FILE")

    shows: ClassVar[bool] = True


@dataclass(frozen=True)
class PlanOptions(ConfigOptions):
    gpu: str = flag("default: h100", default="h100", choices=("a100", "h100", "h200", "b200", "cpu"))
    world_size: int | None = flag("number of GPUs; default: the layout's", "N")
    gpus_per_node: int = flag("default: 8", "N", 8)
    model: str | None = flag("well-known model to plan with: llama-3-70b, qwen3-30b-a3b, ...", "NAME")
    model_config: Path | None = flag("a config.json to plan with in place of model.path's", "FILE")
    mean_prompt: float | None = flag("mean length of prompts; for times", "TOKENS")
    mean_response: float | None = flag("mean length of responses; for times", "TOKENS")
    is_json: bool = switch("print JSON", names="--json")
    suggests: bool = switch("search other layouts, and name the fastest that fit", names="--suggest")


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add an argument for each field of `options` that has help. Its type is read from the annotation."""
    for one in (one for one in fields(options) if one.metadata):
        settings = {name: value for name, value in one.metadata.items() if value is not None}
        names, _ = settings.pop("names", None), settings.pop("takes", None)
        (kind,) = re.findall("bool|int|float|str|Path", str(one.type))
        if kind != "bool":
            settings["type"] = TYPES[kind]
        elif "action" not in settings:
            settings["action"] = "store_true"
        if "Sequence" in str(one.type) and "action" not in settings:
            settings["nargs"] = "+"
        if names is None:
            settings |= {} if one.default is MISSING else {"nargs": "?"}
            parser.add_argument(one.name, **settings)
        else:
            default = list(one.default) if isinstance(one.default, tuple) else one.default
            spellings = names.split() or ["--" + one.name.replace("_", "-")]
            parser.add_argument(*spellings, dest=one.name, default=default, **settings)


def read_options(options: type[Options], parsed: argparse.Namespace) -> Options:
    """Return the options from the arguments that argparse read."""
    given = {one.name: getattr(parsed, one.name) for one in fields(options)}  # type: ignore[arg-type]
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def check_paths(command: str, options: Any) -> None:
    """Raise ConfigError if a path that must exist does not."""
    for one in fields(options):
        path, takes = getattr(options, one.name), one.metadata.get("takes")
        if takes is not None and not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder; {command} takes {takes}{hub_hint(path)}")


def refuse_command(name: str, known: Sequence[str]) -> NoReturn:
    raise ConfigError(f"{name!r} is not a command; {nearest(name, known)}use one of {', '.join(known)}")


def unknown_argument(argument: str, parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """Return the error for an argument that a command does not take, with the argument that may be meant."""
    given, name = getattr(parsed, "overrides", None), argument.partition("=")[0]
    if given is not None and not argument.startswith("-"):
        if "=" in argument:
            return f"unknown argument {argument}; write --set {argument}"
        if given and "=" not in given[-1]:
            return f"unknown argument {argument}; write --set {given[-1]}={argument}"
    if given is not None and "." in name:
        return f"unknown argument {name}; write --set {name.lstrip('-')}=VALUE"
    return f"unknown argument {name}; {nearest(name, re.findall(r'--[a-z][a-z_-]+', parser.format_usage()))}see --help"
