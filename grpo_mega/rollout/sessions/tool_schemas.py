"""The agent function and the tools of a run: what is wrong with them, and the schemas that describe tools to the model.

A child process imports the functions, because user code never runs in the process of a command or a rank.
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_mega import user_code
from grpo_mega.config import RolloutConfig
from grpo_mega.config.rollout import BUILT_IN_TOOLS
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.rewards.worker import ask_child


def agent_problems(rollout: RolloutConfig, code_dir: Path | None) -> Iterator[str]:
    """Yield problems of the names, modules, signatures and docstrings of the agent function and the tools."""
    problems = list(_name_problems(rollout, code_dir))
    yield from problems
    if rollout.has_agents and not problems:
        _ask(rollout.agent, rollout.tools, code_dir)


def tool_schemas(rollout: RolloutConfig, code_dir: Path | None) -> list[dict[str, Any]]:
    """Return the JSON schemas of rollout.tools, in order. Raise ConfigError if there is a problem."""
    return _ask(rollout.agent, rollout.tools, code_dir) if rollout.tools else []


def _name_problems(rollout: RolloutConfig, code_dir: Path | None) -> Iterator[str]:
    keys = {name: "rollout.tools" for name in rollout.tools if name not in BUILT_IN_TOOLS}
    for name, key in (keys | ({} if rollout.agent is None else {rollout.agent: "rollout.agent"})).items():
        if not user_code.is_user_name(name):
            built_in = f", or of {', '.join(BUILT_IN_TOOLS)}" if key == "rollout.tools" else ""
            yield f"{key}={name!r}: must be the name of a function{built_in}; write it like {user_code.FORMS}"
            continue
        try:
            user_code.check_exists(name, code_dir)
        except UserError as error:
            yield from (f"{key}={line}" for line in error.lines)


@functools.cache
def _ask(agent: str | None, tools: tuple[str, ...], code_dir: Path | None) -> list[dict[str, Any]]:
    """Return the schemas of the tools. Raise ConfigError with all problems of the agent function and the tools."""
    key, names = "rollout.tools", ", ".join(map(repr, tools))
    if agent is not None:
        key, names = "rollout.agent", repr(agent)
    given = {"agent": agent, "tools": tools, "code_dir": code_dir}
    problems, schemas = ask_child(__name__, given, f"{key}={names}")
    if problems:
        raise ConfigError(*problems)
    return list(schemas)


def report(agent: str | None, tools: Sequence[str], code_dir: Path | None) -> tuple[list[str], list[dict[str, Any]]]:
    """Import the functions, and return problems and schemas."""
    problems: list[str] = []
    schemas: list[dict[str, Any]] = []
    if agent is not None:
        problems += _problems_of(lambda: check_agent(agent, code_dir), "rollout.agent=")
    for name in tools:
        problems += _problems_of(lambda name=name: schemas.append(schema_of(name, code_dir)), "rollout.tools=")
    known = [schema["function"]["name"] for schema in schemas]
    problems += [f"rollout.tools: two functions are called {one}; rename one" for one in known if known.count(one) > 1]
    return list(dict.fromkeys(problems)), schemas


def check_agent(name: str, code_dir: Path | None) -> None:
    """Raise ConfigError unless this is a coroutine function of chat and prompt."""
    function = user_code.load_function(name, code_dir)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{name!r}: must be a coroutine function; write `async def run(chat, prompt)`")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{name!r}: must take chat and prompt ({error}); correct its arguments") from None


def schema_of(name: str, code_dir: Path | None) -> dict[str, Any]:
    """Return the JSON schema of a tool, without its return value. Raise ConfigError if the function has none."""
    from transformers.utils import get_json_schema  # slow

    function = user_code.load_function(BUILT_IN_TOOLS.get(name, name), code_dir)
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # transformers has an exception for each kind of problem
        problem = " ".join(str(error).split())
        raise ConfigError(
            f"{name!r}: has no JSON schema ({problem}); give it type hints, and a docstring with a line per argument"
            " below `Args:`"
        ) from None
    schema["function"].pop("return", None)
    return schema


def _problems_of(check: Any, key: str) -> list[str]:
    try:
        check()
    except UserError as error:
        return [f"{key}{line}" for line in error.lines]
    return []
