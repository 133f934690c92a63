"""Call a reward function with TRL's signature, `(completions, solution, **kwargs) -> list`, on all samples of a prompt.

A function has this signature if it names completions, prompts or completion_ids. It gets lists with one entry per sample: these
three; the gold answer as solution, answer, ground_truth, and under its column's name; every other data column; prefill; and
finish_reason, "stop" or "length". Completions and prompts are texts if the data's prompts are texts, and messages if the
prompts are messages. The function may be a coroutine function.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NAMES = frozenset({"prompts", "completions", "completion_ids"})
GOLD = ("solution", "answer", "ground_truth")
FINISH_REASON = "finish_reason"  # a key of extras whose value differs within a group
GIVEN = NAMES | {*GOLD, "prefill", FINISH_REASON}  # names that are never options of a function

Texts = tuple[str, str, str, dict[str, Any]]  # prompt, response, gold answer, extras


def takes_groups(function: Callable[..., Any]) -> bool:
    return not NAMES.isdisjoint(parameters_of(function))


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if they cannot be determined."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def call(
    function: Callable[..., Any], samples: Sequence[Texts], given: Mapping[str, Any], token_ids: Sequence[list[int]], form: str
) -> list[Any]:
    """Return the function's result for each sample.

    `given` is Prompt.raw_columns, and `form` is the function's key `completions`. Raises ValueError unless there is
    one reward per sample.
    """
    text, _, answer, extras = samples[0]
    prompt = given.get("prompts", text)
    completions: list[Any] = [response for _, response, _, _ in samples]
    has_text = isinstance(prompt, str)
    is_text = has_text if form == "as_data" else form == "text"
    if is_text != has_text:
        prompt = text if is_text else [{"role": "user", "content": prompt}]
    if not is_text:
        completions = [[{"role": "assistant", "content": response}] for response in completions]
    columns = {**dict.fromkeys(GOLD, answer), **extras, **given, "prompts": prompt}
    values = {name: [value] * len(samples) for name, value in columns.items()}
    values |= {"completions": completions, "completion_ids": list(token_ids)}
    if FINISH_REASON in extras:
        values[FINISH_REASON] = [one[FINISH_REASON] for _, _, _, one in samples]
    parameters = parameters_of(function)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        values = {name: value for name, value in values.items() if name in parameters}
    options = getattr(function, "keywords", {})  # options of the config take precedence over data columns with the same name
    try:
        returned = function(**{name: value for name, value in values.items() if name not in options})
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
    except TypeError as error:
        if is_text and "string indices" in str(error):
            error.args = (f"{error}; completions are texts, as prompts are: set the function's key completions: messages",)
        raise
    rewards = list(returned)
    if len(rewards) != len(samples):
        raise ValueError(f"{len(rewards)} rewards for {len(samples)} completions; return one, or None, for each")
    return rewards
