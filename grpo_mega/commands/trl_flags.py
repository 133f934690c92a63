"""The flags of `grpo-mega grpo`, by the names of TRL and open-r1: trl_flags.yaml lists them, and argparse reads them.

If a flag has no config key, trl.py handles it. A missing flag leaves the config's default. Underscores and dashes are
the same in names. A flag of true or false may stand alone. Errors are ConfigError in one line.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.yaml_text import parse_yaml


@dataclass(frozen=True)
class Flag:
    name: str
    kind: str | Sequence[str] = "text"  # text, bool, int, float, list (of texts), or the words to choose from
    key: str | None = None  # config key with the same value
    help: str = ""
    aliases: Sequence[str] = ()


_TABLE = parse_yaml(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
GROUPS: Mapping[str, list[Flag]] = {
    group: [Flag(name, **row) for name, row in rows.items()] for group, rows in _TABLE["flags"].items()
}
FLAGS: Mapping[str, Flag] = {flag.name: flag for flags in GROUPS.values() for flag in flags}
NOTED: Mapping[str, str] = _TABLE["noted"]
REFUSED: Mapping[str, str] = _TABLE["refused"]
HARMLESS: Mapping[str, list[str]] = _TABLE["harmless"]
LOSS_TYPES: Mapping[str, dict[str, Any]] = _TABLE["loss_types"]
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
            example = f"flags start with --, for example --dataset_name {rest[0]}"
            raise ConfigError(f"{rest[0]!r} stands before any flag; {example}")
        name = rest[0][2:].partition("=")[0]
        close = difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.6)
        remedy = f"did you mean --{close[0]}? For" if close else "see --help; for"
        raise ConfigError(f"unknown flag --{name}; {remedy} any key of the config there is --set KEY=VALUE")
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
