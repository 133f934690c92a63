"""The options of commands, as dataclasses that define flags, types, defaults and help for argparse. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from grpo_mega.paths import user_path

Options = TypeVar("Options")


@dataclass(frozen=True)
class Argument:
    flag: str | None  # None: a positional argument with the field's name
    help: str
    metavar: str | None = None
    choices: Sequence[str] | None = None


OVERRIDES = "overrides a value, for example --set optimizer.lr=1e-6, and keeps text and quotes as they are; may be repeated"


@dataclass(frozen=True)
class ConfigOptions:
    config: Annotated[Path, Argument(None, "YAML file; see examples/*.yaml", "CONFIG")]
    overrides: Annotated[Sequence[str], Argument("--set", OVERRIDES, "KEY=VALUE")] = ()


@dataclass(frozen=True)
class EvalOptions:
    """The options of eval. None means: as in the config."""

    target: Annotated[
        Path, Argument(None, "a run's folder: its checkpoint, or its hf; a config: its model", "RUN_DIR_OR_CONFIG")
    ]
    overrides: Annotated[Sequence[str], Argument("--set", OVERRIDES, "KEY=VALUE")] = ()
    step: Annotated[int | None, Argument("--step", "the run's checkpoint after this step; default: the latest")] = None
    model: Annotated[Path | None, Argument("--model", "checkpoint folder to evaluate in place of the run's", "FOLDER")] = None
    data: Annotated[str | None, Argument("--data", "data set in place of the config's held-out prompts", "PATH")] = None
    train_set: Annotated[bool, Argument("--train-set", "evaluate data.train; --out is then a file for data.pass_rates")] = False
    prompts: Annotated[int | None, Argument("--prompts", "only the first N of each set", "N")] = None
    samples: Annotated[int | None, Argument("--samples", "sampled responses per prompt; default: eval.samples", "N")] = None
    ks: Annotated[
        Sequence[int] | None, Argument("--k", "the K of pass@K and majority@K; default: powers of two up to N", "K")
    ] = None
    temperature: Annotated[
        float | None, Argument("--temperature", "of the sampled responses; default: eval.temperature", "T")
    ] = None
    top_p: Annotated[float | None, Argument("--top-p", "of the sampled responses; default: eval.top_p", "P")] = None
    greedy: Annotated[bool | None, Argument("--greedy", "one greedy response per prompt; default: eval.greedy")] = None
    out: Annotated[Path | None, Argument("--out", "JSON lines to write, one per prompt; must not exist", "FILE")] = None


@dataclass(frozen=True)
class PlanOptions(ConfigOptions):
    gpu: Annotated[str, Argument("--gpu", "default: h100", choices=("a100", "h100", "h200", "b200"))] = "h100"
    world_size: Annotated[int | None, Argument("--world-size", "number of GPUs; default: the layout's", "N")] = None
    gpus_per_node: Annotated[int, Argument("--gpus-per-node", "default: 8", "N")] = 8
    model: Annotated[
        str | None, Argument("--model", "well-known model to plan with: llama-3-70b, qwen3-30b-a3b, ...", "NAME")
    ] = None
    model_config: Annotated[
        Path | None, Argument("--model-config", "a config.json to plan with in place of model.path's", "FILE")
    ] = None
    mean_prompt: Annotated[float | None, Argument("--mean-prompt", "mean length of prompts; for times", "TOKENS")] = None
    mean_response: Annotated[float | None, Argument("--mean-response", "mean length of responses; for times", "TOKENS")] = None
    lengths: Annotated[
        str | None,
        Argument(
            "--lengths", "lengths of responses: percentiles like p50=700,p99=12000, or a run's samples", "LENGTHS_OR_RUN_DIR"
        ),
    ] = None
    is_json: Annotated[bool, Argument("--json", "print JSON")] = False
    suggests: Annotated[bool, Argument("--suggest", "search other layouts, and name the fastest that fit")] = False
    rehearses: Annotated[bool, Argument("--rehearse", "compare with real Megatron on a few ranks, without a GPU")] = False
    ranks: Annotated[Sequence[int], Argument("--ranks", "to rehearse; default: one of some pipeline stages", "N")] = ()
    explains: Annotated[bool, Argument("--explain", "print every figure's formula and inputs, and all assumptions")] = False


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add an argument for each field of `options`."""
    hints = get_type_hints(options, include_extras=True)
    for one in fields(options):
        hint, argument = get_args(hints[one.name])
        settings = {"help": argument.help} | _settings_of(hint, is_repeated=argument.flag == "--set")
        settings |= {name: value for name in ("metavar", "choices") if (value := getattr(argument, name)) is not None}
        if argument.flag is None:
            parser.add_argument(one.name, **settings)
        else:
            default = list(one.default) if isinstance(one.default, tuple) else one.default
            parser.add_argument(argument.flag, dest=one.name, default=default, **settings)


def read_options(options: type[Options], parsed: argparse.Namespace) -> Options:
    """Return the options from the arguments that argparse read."""
    given = {one.name: getattr(parsed, one.name) for one in fields(options)}  # type: ignore[arg-type]
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _settings_of(hint: Any, *, is_repeated: bool) -> dict[str, Any]:
    """Return the arguments of `add_argument` that follow from a field's type."""
    if hint is bool:
        return {"action": "store_true"}
    if hint == bool | None:
        return {"action": argparse.BooleanOptionalAction}
    kind = get_args(hint)[0] if NoneType in get_args(hint) else hint
    if get_origin(kind) is Sequence:
        (kind,) = get_args(kind)
        return {"action": "append", "type": kind} if is_repeated else {"nargs": "+", "type": kind}
    return {"type": user_path if kind is Path else kind}
