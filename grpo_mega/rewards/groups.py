"""Call a reward function of TRL's signature, `(completions, solution, **kwargs) -> list`, on all samples of a prompt at once.

It is one that names completions, prompts or completion_ids, and gets lists with one entry per sample: these three; the gold
answer as solution, answer and ground_truth, and under its column's name; every other column of the data; prefill; and
finish_reason, "stop" or "length" for each sample. Completions and prompts are texts where the data's prompts are, and messages
where those are. It may be a coroutine function.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NAMES = frozenset({"prompts", "completions", "completion_ids"})
GOLD = ("solution", "answer", "ground_truth")
FINISH_REASON = "finish_reason"  # of extras; it differs within a group
GIVEN = NAMES | {*GOLD, "prefill", FINISH_REASON}  # are no options of a function

Texts = tuple[str, str, str, dict[str, Any]]  # prompt, response, gold answer, extras


def takes_groups(function: Callable[..., Any]) -> bool:
    return not NAMES.isdisjoint(parameters_of(function))


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if one cannot tell."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def call(
    function: Callable[..., Any], samples: Sequence[Texts], given: Mapping[str, Any], token_ids: Sequence[list[int]], form: str
) -> list[Any]:
    """Return what the function gives each sample.

    `given` is Prompt.given, `form` the function's key `completions`. Raises ValueError unless there is one reward per sample.
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
    options = getattr(function, "keywords", {})  # those of the config win over columns of the same name
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
