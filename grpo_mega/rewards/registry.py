"""Find reward functions by name: one of BUILT_IN, or a user function by the rule of user_code.py.

`check` imports no user code, so a misspelt name or option is refused before anything starts. `bind` imports the
function's module. A user's function is user code, so only workers and the child of worker.py do it. Options are
the keyword arguments that a function takes after (prompt, response, answer, extras), or in addition to the arguments
that `call_group` passes. A function that takes `step_splitter` gets rewards.step_splitter unless its options set
another.

A function has TRL's signature, `(completions, solution, **kwargs) -> list`, if it names completions, prompts or
completion_ids. It is called on all samples of a prompt (`call_group`). It gets lists with one entry per sample: these
three; the gold answer as solution, answer, ground_truth, and under its column's name; every other data column; prefill;
and finish_reason, "stop" or "length". Completions and prompts are texts if the data's prompts are texts, and messages
if the prompts are messages. The function may be a coroutine function. Of a conversation, a completion that is a text is
the last turn, and one that is messages has all messages after the prompt.
"""

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from grpo_mega import user_code
from grpo_mega.errors import ConfigError
from grpo_mega.rewards.api import Extras, RewardFunction, Score, splitter
from grpo_mega.text import nearest

BUILT_IN = {  # dotted paths
    "accuracy": "grpo_mega.rewards.math.accuracy.accuracy",
    "code": "grpo_mega.rewards.code.code",
    "cosine": "grpo_mega.rewards.shaping.cosine",
    "format": "grpo_mega.rewards.shaping.format_reward",
    "language_consistency": "grpo_mega.rewards.shaping.language_consistency",
    "len": "grpo_mega.rewards.shaping.len_reward",
    "reasoning_steps": "grpo_mega.rewards.shaping.reasoning_steps",
    "repetition_penalty": "grpo_mega.rewards.shaping.repetition_penalty",
    "reward_model": "grpo_mega.rewards.reward_model.reward_model",
    "soft_format": "grpo_mega.rewards.shaping.soft_format",
    "tag_count": "grpo_mega.rewards.shaping.tag_count",
}
ACCURACY = "accuracy"
# Functions of the accuracy verdict, so workers compute it once for all of them. The pool calls cosine and len with
# verdicts and lengths.
JUDGED = frozenset({ACCURACY, "len", "cosine"})
# Functions that wait for a server, so a timeout is not the fault of the response.
OF_SERVERS = frozenset({"reward_model"})
# Functions that run the response as a program, elsewhere. Their verdict "error" is a program's, and a worker that ends
# or hangs is not the fault of the response.
OF_PROGRAMS = frozenset({"code"})
_NUM_ARGUMENTS = 4  # prompt, response, answer, extras
# A function that names one of them has TRL's signature.
_LISTS = frozenset({"prompts", "completions", "completion_ids"})
GOLD = ("solution", "answer", "ground_truth")
FINISH_REASON = "finish_reason"  # a key of extras whose value differs within a group
MESSAGES = "messages"  # key of extras: all messages of a conversation
AGENT = "agent"  # name of the score of an agent function that returns a number
_GIVEN = _LISTS | {*GOLD, "prefill", FINISH_REASON}  # names that are never options of a function
Sample = tuple[str, str, str, Extras]  # prompt, response, gold answer, extras
# By type of an option: the accepted types of its values, and their name in errors.
_FORMS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false, without quotes"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "a text"),
}


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is built in or has the form of a user function."""
    if name in BUILT_IN or user_code.is_user_name(name):
        return
    if name.startswith("soft_overlong"):
        raise ConfigError(
            f"reward function {name!r}: is not a reward function here; set algorithm.overlong_buffer and"
            " overlong_penalty"
        )
    hint = nearest(name.lower(), BUILT_IN, 0.5)
    raise ConfigError(
        f"reward function {name!r} is unknown; {hint}use one of {', '.join(sorted(BUILT_IN))}, or "
        f"your own function, like {user_code.FORMS}"
    )


def check_rewards(name: str, options: Mapping[str, Any], step_splitter: str, deadline_s: float) -> None:
    """Raise ConfigError for an unknown name or for wrong options of a built-in function. Import no user code."""
    check_name(name)
    if name not in BUILT_IN:
        return
    function = bind(name, options, step_splitter)
    types = get_type_hints(resolve_reward(name))
    for option, value in options.items():
        accepted, form = _FORMS.get(types.get(option), (object, ""))
        if not isinstance(value, accepted) or (isinstance(value, bool) and accepted not in (bool, object)):
            raise ConfigError(f"reward function {name!r}: its option {option}={value!r}: must be {form}; correct it")
    if options and ".shaping." in BUILT_IN[name]:
        try:
            function(*((Score(0.0, ""), 0) if name in JUDGED else ("", "", "0", {})))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"reward function {name!r} with options {dict(options)}: {error}") from None
    if name in OF_PROGRAMS | OF_SERVERS:
        module = importlib.import_module(BUILT_IN[name].rpartition(".")[0])
        module.check_deadline(options, deadline_s)


def bind(name: str, options: Mapping[str, Any], step_splitter: str, code_dir: Path | None = None) -> RewardFunction:
    """Return the function called `name` with its options bound. user_code.py describes code_dir.

    Raises:
        ConfigError: the name is unknown, its module cannot be imported or lacks the function, or it takes other
        options.
    """
    function = resolve_reward(name, code_dir)
    given = dict(options)
    if (accepted := _options_of(function)) is not None:
        for option in given:
            if option not in accepted:
                hint = nearest(option, accepted, 0.5) or f"it takes {', '.join(accepted) or 'none'}"
                raise ConfigError(f"reward function {name!r} has no option {option!r}; {hint.rstrip()}")
        if "step_splitter" in accepted:
            given.setdefault("step_splitter", step_splitter)
        for option, is_required in accepted.items():
            if is_required and option not in given:
                raise ConfigError(
                    f"reward function {name!r} needs the option {option!r}; add options: {{{option}: ...}} to it"
                )
    if isinstance(given.get("step_splitter"), str):
        splitter(given["step_splitter"])
    return partial(function, **given) if given else function


def resolve_reward(name: str, code_dir: Path | None = None) -> RewardFunction:
    """Return the function called `name`.

    Raises:
        ConfigError: the name is unknown, or its module cannot be imported or lacks the function.
    """
    check_name(name)
    if name in BUILT_IN:
        module_name, _, function_name = BUILT_IN[name].rpartition(".")
        return getattr(importlib.import_module(module_name), function_name)
    try:
        function = user_code.load_function(name, code_dir)
    except ConfigError as error:
        raise ConfigError(f"reward function {error}") from error
    return function() if isinstance(function, type) else function  # ms-swift defines reward functions as classes


def takes_groups(function: Callable[..., Any]) -> bool:
    return not _LISTS.isdisjoint(_parameters_of(function))


def call_group(
    function: Callable[..., Any],
    samples: Sequence[Sample],
    given: Mapping[str, Any],
    token_ids: Sequence[list[int]],
    form: str,
    conversations: Sequence[list[dict[str, Any]]] = (),
) -> list[Any]:
    """Return the result for each sample of a function with TRL's signature.

    `given` is Prompt.raw_columns, and `form` is the function's key `completions`. `conversations` has the messages of
    each sample, if the samples are conversations. Raises ValueError unless there is one reward per sample.
    """
    text, _, answer, extras = samples[0]
    prompt = given.get("prompts", text)
    has_text = isinstance(prompt, str)
    is_text = has_text if form == "as_data" else form == "text"
    if is_text != has_text:
        prompt = text if is_text else [{"role": "user", "content": prompt}]
    completions: list[Any] = [
        response if is_text else [{"role": "assistant", "content": response}] for _, response, _, _ in samples
    ]
    if conversations and not is_text:
        completions = [
            messages[len(prompt) if messages[: len(prompt)] == prompt else 0 :] for messages in conversations
        ]
    columns = {**dict.fromkeys(GOLD, answer), **extras, **given, "prompts": prompt}
    values = {name: [value] * len(samples) for name, value in columns.items()}
    values |= {"completions": completions, "completion_ids": list(token_ids)}
    if FINISH_REASON in extras:
        values[FINISH_REASON] = [one[FINISH_REASON] for _, _, _, one in samples]
    if conversations:
        values[MESSAGES] = list(conversations)
    # Options of the config take precedence over data columns with the same name.
    parameters, options = _parameters_of(function), getattr(function, "keywords", {})
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    taken = [name for name in values if name not in options and (takes_all or name in parameters)]
    try:
        returned = function(**{name: values[name] for name in taken})
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
    except TypeError as error:
        if is_text and "string indices" in str(error):
            error.args = (
                f"{error}; completions are texts, as prompts are: set the function's key completions: messages",
            )
        raise
    rewards = list(returned)
    if len(rewards) != len(samples):
        raise ValueError(f"{len(rewards)} rewards for {len(samples)} completions; return one, or None, for each")
    return rewards


def _options_of(function: RewardFunction) -> dict[str, bool] | None:
    """Return the options that a function takes, each with whether it is required; None if it takes any or if
    unknown.
    """
    parameters = list(_parameters_of(function).values())
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    if takes_groups(function):
        # None is required: a data column may supply it.
        return {p.name: False for p in parameters if p.name not in _GIVEN}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = [p for p in parameters if p not in positional[:_NUM_ARGUMENTS]]
    return {p.name: p.default is p.empty for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if they cannot be determined."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
