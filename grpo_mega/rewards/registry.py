"""Reward functions by name: `accuracy`, `format`, or the dotted path of the user's own, `package.module.function`.

`check_name` imports nothing, so that a misspelt name is refused before anything starts; `resolve` imports the function's
module, which for a dotted path is the user's code and is therefore done in the worker processes only.
"""

import difflib
import importlib

from grpo_mega.errors import ConfigError
from grpo_mega.rewards.score import RewardFunction

BUILT_IN = {
    "accuracy": "grpo_mega.rewards.accuracy.accuracy",
    "format": "grpo_mega.rewards.format.format_reward",
}


def check_name(name: str) -> None:
    """Raises ConfigError unless `name` is built in or has the form of a dotted path."""
    if name in BUILT_IN or ("." in name and all(part.isidentifier() for part in name.split("."))):
        return
    nearest = difflib.get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(
        f"reward function {name!r} is unknown; {hint}use one of {', '.join(sorted(BUILT_IN))}, or the "
        "dotted path of your own function, like my_package.my_module.my_function"
    )


def resolve(name: str) -> RewardFunction:
    """The function called `name`.

    Raises:
        ConfigError: unknown name, a module that cannot be imported, or one without such a function.
    """
    check_name(name)
    module_name, _, function_name = BUILT_IN.get(name, name).rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except Exception as error:
        raise ConfigError(
            f"reward function {name!r}: importing {module_name} failed with {type(error).__name__}: {error}; "
            "the module must be importable from where the trainer starts (see PYTHONPATH)"
        ) from error
    if not callable(function):
        raise ConfigError(f"reward function {name!r}: {module_name} has no function {function_name}; check the name")
    return function
