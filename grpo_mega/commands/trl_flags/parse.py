"""A command line of flags, read into values of their kinds. Underscores and dashes are the same; `--name value` and
`--name=value` too; a flag of true or false may stand alone. Raises ConfigError in one line for whatever it does not know."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from grpo_mega.commands.trl_flags.table import (
    ALIASES,
    FLAG,
    FLAGS,
    GROUPS,
    HARMLESS,
    HARMLESS_OF,
    LIST,
    NOTED,
    NUMBER,
    REFUSED,
    REQUIRED,
    TEXT,
    WHOLE,
)
from grpo_mega.errors import ConfigError

Values = dict[str, Any]  # by flag: bool, int, float, str or list[str], as its kind says
_TRUE, _FALSE = {"true", "yes", "1"}, {"false", "no", "0"}
_BATCH_TEXT = """\
A rollout has per_device_train_batch_size x steps_per_generation x data-parallel ranks samples: that many / num_generations
prompts. An optimizer step has per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks samples. They
are packed: a micro-batch holds as many tokens as per_device_train_batch_size samples of the greatest length. Where none of
these flags is given, a step has the config's 32 prompts and one optimizer step. All defaults are this trainer's, not TRL's."""


def parse(arguments: Sequence[str]) -> tuple[Values, list[str]]:
    """The values, and a note for each flag that has no effect here."""
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
    """All flags by group, with the keys that they set."""
    lines = ["usage: python -m grpo_mega.grpo --model_name_or_path MODEL --dataset_name DATA --output_dir DIR [flags]", ""]
    for group, flags in GROUPS.items():
        lines.append(f"{group}:")
        for flag in flags:
            key = f"[{flag.key}]" if flag.key else ""
            lines.append(f"  --{flag.name:28} {' '.join(part for part in (flag.help, key) if part)}")
        lines.append("")
    return "\n".join([*lines, _BATCH_TEXT])


def _split(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(name, values) of each flag, with underscores."""
    found: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, separator, value = argument[2:].partition("=")
            name = name.replace("-", "_")
            found.append((ALIASES.get(name, name), [value] if separator else []))
        elif found:
            found[-1][1].append(argument)
        else:
            raise ConfigError(
                f"{argument!r} stands before any flag; flags begin with --, for example --dataset_name {argument}"
            )
    return found


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
