"""Find reward functions by name: one of BUILT_IN, or the dotted path of a user function, `package.module.function`.

`check` imports no user code, so a misspelt name or option is refused before anything starts. `bind` imports the function's
module. For a dotted path that is user code, so only worker processes do it. Options are the keyword arguments that a function
takes after (prompt, response, answer, extras), or in addition to the arguments that groups.py passes with TRL's signature. A
function that takes `step_splitter` gets rewards.step_splitter unless its options set another.
"""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from grpo_mega.errors import ConfigError
from grpo_mega.rewards.api import RewardFunction
from grpo_mega.rewards.steps import splitter
from grpo_mega.rewards.trl_signature import GIVEN, parameters_of, takes_groups

BUILT_IN = {  # dotted paths; for a function of an example, its file in the repository
    "accuracy": "grpo_mega.rewards.math.accuracy.accuracy",
    "arithmetic_oracle": "examples/arithmetic_oracle.py",
    "arithmetic_steps": "examples/process_supervision/arithmetic_steps.py",
    "cosine": "grpo_mega.rewards.shaping.cosine",
    "format": "grpo_mega.rewards.format.format_reward",
    "language_consistency": "grpo_mega.rewards.shaping.language_consistency",
    "len": "grpo_mega.rewards.shaping.len_reward",
    "reasoning_steps": "grpo_mega.rewards.shaping.reasoning_steps",
    "repetition_penalty": "grpo_mega.rewards.shaping.repetition_penalty",
    "reward_model": "grpo_mega.rewards.reward_model.reward_model",
    "soft_format": "grpo_mega.rewards.format.soft_format",
    "tag_count": "grpo_mega.rewards.format.tag_count",
}
OF_GROUPS = frozenset({"len"})  # built-in functions that are called once for all samples of a prompt
OF_SERVERS = frozenset({"reward_model"})  # functions that wait for a server, so a timeout is not the fault of the response
_NUM_ARGUMENTS = 4  # prompt, response, answer, extras
_FORMS: dict[Any, tuple[Any, str]] = {  # by type of an option: the accepted types of its values, and their name in errors
    bool: (bool, "true or false, without quotes"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "a text"),
}


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is built in or has the form of a dotted path."""
    if name in BUILT_IN or ("." in name and all(part.isidentifier() for part in name.split("."))):
        return
    if name.startswith("soft_overlong"):
        raise ConfigError(
            f"reward function {name!r}: is not a reward function here; set algorithm.overlong_buffer and overlong_penalty"
        )
    nearest = difflib.get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise ConfigError(
        f"reward function {name!r} is unknown; {hint}use one of {', '.join(sorted(BUILT_IN))}, or the "
        "dotted path of your own function, like my_package.my_module.my_function"
    )


def check(name: str, options: Mapping[str, Any], step_splitter: str, deadline_s: float) -> None:
    """Raise ConfigError for an unknown name or for wrong options of a built-in function. Import no user code."""
    check_name(name)
    if name not in BUILT_IN:
        return
    function = bind(name, options, step_splitter)
    _check_types(name, options)
    if ".shaping." in BUILT_IN[name] and name not in OF_GROUPS:
        try:
            function("", "", "0", {})
        except (TypeError, ValueError) as error:
            raise ConfigError(f"reward function {name!r} with options {dict(options)}: {error}") from None
    if name == "reward_model":
        from grpo_mega.rewards.reward_model import check_deadline  # imported late, because its imports take time

        check_deadline(options, deadline_s)


def _check_types(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if an option of a built-in function has a value of the wrong type, such as "no" for a bool."""
    types = get_type_hints(resolve(name))
    for option, value in options.items():
        accepted, form = _FORMS.get(types.get(option), (object, ""))
        if not isinstance(value, accepted) or (isinstance(value, bool) and accepted not in (bool, object)):
            raise ConfigError(f"reward function {name!r}: its option {option}={value!r}: must be {form}; correct it")


def bind(name: str, options: Mapping[str, Any], step_splitter: str) -> RewardFunction:
    """Return the function called `name` with its options bound.

    Raises:
        ConfigError: the name is unknown, its module cannot be imported or lacks the function, or it takes other options.
    """
    function = resolve(name)
    accepted = _options_of(function)
    given = dict(options)
    if accepted is not None:
        for option in given:
            if option not in accepted:
                nearest = difflib.get_close_matches(option, accepted, n=1, cutoff=0.5)
                hint = f"did you mean {nearest[0]}?" if nearest else f"it takes {', '.join(accepted) or 'none'}"
                raise ConfigError(f"reward function {name!r} has no option {option!r}; {hint}")
        if "step_splitter" in accepted:
            given.setdefault("step_splitter", step_splitter)
        for option, is_required in accepted.items():
            if is_required and option not in given:
                raise ConfigError(f"reward function {name!r} needs the option {option!r}; add options: {{{option}: ...}} to it")
    if isinstance(given.get("step_splitter"), str):
        splitter(given["step_splitter"])
    return partial(function, **given) if given else function


def resolve(name: str) -> RewardFunction:
    """Return the function called `name`.

    Raises:
        ConfigError: the name is unknown, or its module cannot be imported or lacks the function.
    """
    check_name(name)
    if name in BUILT_IN and BUILT_IN[name].endswith(".py"):
        return getattr(_example(name, BUILT_IN[name]), name)
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
    return function() if isinstance(function, type) else function  # ms-swift defines reward functions as classes


@lru_cache(maxsize=8)
def _example(name: str, path: str) -> ModuleType:
    """Import the file of an example. `path` is relative to the repository. Raises ConfigError if there is no such file."""
    file = Path(__file__).resolve().parents[2] / path
    if not file.is_file():
        raise ConfigError(
            f"reward function {name!r}: it is an example, and there is no {file}; run from a checkout of the repository, "
            f"or copy its {path} to a folder on PYTHONPATH and name {file.stem}.{name}"
        )
    spec = importlib.util.spec_from_file_location(f"grpo_mega_example_{file.stem}", file)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def _options_of(function: RewardFunction) -> dict[str, bool] | None:
    """Return the options that a function takes, each with whether it is required; None if it takes any or if unknown."""
    parameters = list(parameters_of(function).values())
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    if takes_groups(function):
        return {
            p.name: False for p in parameters if p.name not in GIVEN
        }  # a data column may supply any of them, so none is required
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken = positional[:_NUM_ARGUMENTS]
    named = [p for p in parameters if p not in taken and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p.default is p.empty for p in named}
