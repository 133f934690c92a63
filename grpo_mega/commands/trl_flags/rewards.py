"""Turn `--reward-funcs NAME ...` and `--reward-weights W ...` into one override of the key rewards.functions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_mega.errors import ConfigError


def add_reward_flags(parser: argparse.ArgumentParser) -> None:
    """Add both flags, with dashes and with underscores."""
    parser.add_argument(
        "--reward-funcs",
        "--reward_funcs",
        nargs="+",
        metavar="NAME",
        help="reward functions in place of the file's, each built in or a dotted path like my_package.my_module.my_function; "
        "options that the file gives a function stay",
    )
    parser.add_argument(
        "--reward-weights", "--reward_weights", nargs="+", metavar="W", help="their weights, in the same order; 1 by default"
    )


def overrides_of(options: argparse.Namespace) -> list[str]:
    """Return the overrides of --set, followed by the override of the reward flags. Raise ConfigError."""
    known: dict[str, Mapping[str, Any]] = {}
    if options.reward_funcs is not None:
        from grpo_mega import config as configs
        from grpo_mega.config.rewards import ALIASES

        known = {f.name: f.options for f in configs.load(options.config, options.overrides).rewards.functions}
        known |= {alias: known[name] for alias, name in ALIASES.items() if name in known}
    return [*options.overrides, *reward_override(options.reward_funcs, options.reward_weights, known)]


def reward_override(
    names: Sequence[str] | None, weights: Sequence[str | float] | None, options: Mapping[str, Mapping[str, Any]] | None = None
) -> list[str]:
    """Return one "rewards.functions=[...]", or nothing if no function is named. `options` holds the functions' options by name.

    Raise ConfigError.
    """
    if names is None:
        if weights is not None:
            raise ConfigError(f"--reward_weights {_spaced(weights)} has no functions to weigh; name them by --reward_funcs")
        return []
    if weights is None:
        weights = [1.0] * len(names)
    if len(weights) != len(names):
        raise ConfigError(
            f"--reward_weights {_spaced(weights)} are {len(weights)}, but --reward_funcs {_spaced(names)} are {len(names)}; "
            "give one weight for each, in the same order"
        )
    functions = [
        {"name": name, "weight": _number(weight), "options": dict((options or {}).get(name, {}))}
        for name, weight in zip(names, weights, strict=True)
    ]
    return [f"rewards.functions={json.dumps(functions)}"]


def _number(weight: str | float) -> float:
    try:
        return float(weight)
    except ValueError:
        raise ConfigError(f"--reward_weights: {weight!r} is not a number; give one for each function") from None


def _spaced(values: Sequence[object]) -> str:
    return " ".join(map(str, values))
