"""The options of commands, as dataclasses from which argparse takes its arguments. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

Options = TypeVar("Options")


class Argument:
    """The arguments of `add_argument` for a field. Without a flag it is positional, and has the field's name."""

    def __init__(self, flag: str | None, help: str, **settings: Any) -> None:
        self.flag = flag
        self.settings = {"help": help, **settings}


OVERRIDES = "overrides a value of the config, for example --set optimizer.lr=1e-6; may be repeated"
Overrides = Annotated[Sequence[str], Argument("--set", OVERRIDES, action="append", metavar="KEY=VALUE")]


@dataclass(frozen=True)
class ConfigOptions:
    config: Annotated[Path, Argument(None, "YAML file; see examples/*.yaml", type=Path, metavar="CONFIG")]
    overrides: Overrides = ()


@dataclass(frozen=True)
class EvalOptions:
    """The options of eval; None: as in the config."""

    target: Annotated[
        Path,
        Argument(
            None, "a run's folder: its checkpoint, or its hf; a config: its model", type=Path, metavar="RUN_DIR_OR_CONFIG"
        ),
    ]
    overrides: Overrides = ()
    step: Annotated[int | None, Argument("--step", "the run's checkpoint after this step; default: the latest", type=int)] = (
        None
    )
    model: Annotated[
        Path | None, Argument("--model", "checkpoint folder to evaluate in place of the run's", type=Path, metavar="FOLDER")
    ] = None
    data: Annotated[str | None, Argument("--data", "data set in place of the config's held-out prompts", metavar="PATH")] = None
    train_set: Annotated[
        bool, Argument("--train-set", "evaluate data.train; --out is then a file for data.pass_rates", action="store_true")
    ] = False
    prompts: Annotated[int | None, Argument("--prompts", "only the first N of each set", type=int, metavar="N")] = None
    samples: Annotated[
        int | None, Argument("--samples", "sampled responses per prompt; default: eval.samples", type=int, metavar="N")
    ] = None
    ks: Annotated[
        Sequence[int] | None,
        Argument("--k", "the K of pass@K and majority@K; default: powers of two up to N", type=int, nargs="+", metavar="K"),
    ] = None
    temperature: Annotated[
        float | None,
        Argument("--temperature", "of the sampled responses; default: eval.temperature", type=float, metavar="T"),
    ] = None
    top_p: Annotated[
        float | None, Argument("--top-p", "of the sampled responses; default: eval.top_p", type=float, metavar="P")
    ] = None
    greedy: Annotated[
        bool | None,
        Argument("--greedy", "one greedy response per prompt; default: eval.greedy", action=argparse.BooleanOptionalAction),
    ] = None
    out: Annotated[
        Path | None, Argument("--out", "JSON lines to write, one per prompt; must not exist", type=Path, metavar="FILE")
    ] = None


@dataclass(frozen=True)
class PlanOptions(ConfigOptions):
    gpu: Annotated[str, Argument("--gpu", "default: h100", choices=("a100", "h100", "h200", "b200"))] = "h100"
    world_size: Annotated[
        int | None, Argument("--world-size", "number of GPUs; default: the layout's tp * pp * dp", type=int, metavar="N")
    ] = None
    gpus_per_node: Annotated[int, Argument("--gpus-per-node", "default: 8", type=int, metavar="N")] = 8
    model: Annotated[
        str | None, Argument("--model", "well-known model to plan with: llama-3-70b, qwen3-30b-a3b, ...", metavar="NAME")
    ] = None
    model_config: Annotated[
        Path | None,
        Argument("--model-config", "a config.json to plan with in place of model.path's", type=Path, metavar="FILE"),
    ] = None
    mean_prompt: Annotated[
        float | None, Argument("--mean-prompt", "mean length of prompts; for times", type=float, metavar="TOKENS")
    ] = None
    mean_response: Annotated[
        float | None, Argument("--mean-response", "mean length of responses; for times", type=float, metavar="TOKENS")
    ] = None
    is_json: Annotated[bool, Argument("--json", "print JSON", action="store_true")] = False
    suggests: Annotated[
        bool, Argument("--suggest", "search other layouts, and name the fastest that fit", action="store_true")
    ] = False
    rehearses: Annotated[
        bool, Argument("--rehearse", "compare with real Megatron on a few ranks, without a GPU", action="store_true")
    ] = False
    ranks: Annotated[
        Sequence[int],
        Argument("--ranks", "to rehearse; default: one of some pipeline stages", type=int, nargs="+", metavar="N"),
    ] = ()
    explains: Annotated[
        bool, Argument("--explain", "print every figure's formula and inputs, and all assumptions", action="store_true")
    ] = False


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add an argument for each field of `options`."""
    hints = get_type_hints(options, include_extras=True)
    for one in fields(options):
        (argument,) = hints[one.name].__metadata__
        if argument.flag is None:
            parser.add_argument(one.name, **argument.settings)
        else:
            default = list(one.default) if isinstance(one.default, tuple) else one.default
            parser.add_argument(argument.flag, dest=one.name, default=default, **argument.settings)


def read_options(options: type[Options], parsed: argparse.Namespace) -> Options:
    """Return what argparse read of the arguments that `add_options` added."""
    given = {one.name: getattr(parsed, one.name) for one in fields(options)}  # type: ignore[arg-type]
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
