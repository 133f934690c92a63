"""Rules for `rewards`: functions must be known or importable, with valid options. Imports none of the user's code."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.machinery import PathFinder

from grpo_mega.config.rewards import RewardFunctionConfig, RewardsConfig
from grpo_mega.errors import UserError
from grpo_mega.rewards import registry


def reward_problems(rewards: RewardsConfig) -> Iterator[str]:
    """Yield problems of each reward function's name, module or options."""
    for function in rewards.functions:
        try:
            registry.check(function.name, function.options, rewards.step_splitter, rewards.deadline_s)
        except UserError as error:
            yield from error.lines
        else:
            yield from _module_problems(function)


def _module_problems(function: RewardFunctionConfig) -> Iterator[str]:
    module = function.name.rpartition(".")[0]
    if function.name not in registry.BUILT_IN and not _can_find(module):
        yield (
            f"reward function {function.name!r}: there is no module {module} to import; "
            "check the name, and set PYTHONPATH to the folder that holds it"
        )


def _can_find(module: str) -> bool:
    """Return True if a module could be imported. Import nothing of it."""
    path: list[str] | None = None
    parts = module.split(".")
    for number, part in enumerate(parts):
        # Search for its last name, because without __init__.py a full name is only looked up among imported modules.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            # Another finder, for example of an editable installation, may know a top-level module.
            return number == 0 and importlib.util.find_spec(part) is not None
        if spec.submodule_search_locations is None:
            return number == len(parts) - 1
        path = list(spec.submodule_search_locations)
    return True
