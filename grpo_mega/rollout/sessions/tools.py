"""Tools: Python functions that the model calls. This code runs inside an agent worker and never imports torch.

A tool that is a coroutine function runs in the worker's event loop. Any other tool runs in a process that is forked for
this one call and killed after it, with everything that it started. So a tool that hangs, crashes or exits costs only
its deadline. At most MAX_CALLS such calls run at once. Their modules should be light, unless they are named as
module.function: then the fork server imports them once.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from grpo_mega import user_code
from grpo_mega.config.rollout import BUILT_IN_TOOLS
from grpo_mega.errors import UserError
from grpo_mega.rewards.forked import ForkedJob, ForkServer, Serve, Worker, WorkerEnded, describe_error
from grpo_mega.text import well_formed

MAX_CALLS = 32
MAX_RESULT_CHARS = 20_000


def load_tool(name: str, code_dir: Path | None) -> Callable[..., Any]:
    """Return the function of a tool. Raise ConfigError if it cannot be imported."""
    return user_code.load_function(BUILT_IN_TOOLS.get(name, name), code_dir)


class Toolbox:
    """The tools of a run, keyed by the names of their functions."""

    def __init__(self, names: Sequence[str], code_dir: Path | None, timeout_s: float) -> None:
        self._code_dir, self._timeout_s = code_dir, timeout_s
        loaded = {name: load_tool(name, code_dir) for name in names}
        self._names = {function.__name__: name for name, function in loaded.items()}
        self._coroutines = {f.__name__: f for f in loaded.values() if inspect.iscoroutinefunction(f)}
        forked = [BUILT_IN_TOOLS.get(name, name) for name, f in loaded.items() if f.__name__ not in self._coroutines]
        # This thread lives as long as the worker, so the server does too.
        self._server = ForkServer([name.rpartition(".")[0] for name in forked if ":" not in name])
        if forked:
            self._server.ensure_running()
        self._threads = ThreadPoolExecutor(MAX_CALLS, "tools")

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Run a tool call of an assistant message. Return the tool's message; errors are told to the model."""
        name = call["function"]["name"]
        try:
            content = await self._run(name, arguments_of(call))
        except ToolProblem as problem:
            content = f"Error: {problem}"
        return {"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": content}

    async def _run(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self._names:
            raise ToolProblem(f"there is no tool {name!r}; the tools are {', '.join(self._names) or 'none'}")
        if (function := self._coroutines.get(name)) is None:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._run_forked, name, arguments)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return as_text(await function(**arguments))
        except Exception as error:
            raise self._late(name) if limit.expired() else ToolProblem(describe_error(error)) from None

    def _run_forked(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool in a new process. Raise ToolProblem."""
        try:
            with contextlib.closing(Worker(self._server, ToolJob(self._code_dir, self._names[name]))) as worker:
                outcome = worker.run(arguments, self._timeout_s)
        except UserError as error:
            raise ToolProblem(str(error)) from None
        except WorkerEnded as ended:
            raise ToolProblem(f"the tool's process ended with {ended}") from None
        if outcome is None:
            raise self._late(name)
        result, problem = outcome
        if problem:
            raise ToolProblem(problem)
        return str(result)

    def _late(self, name: str) -> ToolProblem:
        return ToolProblem(f"{name} took longer than {self._timeout_s:g} s")


class ToolProblem(Exception):
    """A problem that the model is told."""


@dataclass(frozen=True)
class ToolJob(ForkedJob):
    """Runs one tool call in its own process."""

    name: str

    def prepare(self) -> tuple[bool, Serve]:
        function = load_tool(self.name, self.code_dir)

        def serve(owner: connection.Connection[Any, Any]) -> None:
            arguments = owner.recv()
            try:
                outcome = as_text(function(**arguments)), ""
            except BaseException as error:  # SystemExit, too
                outcome = "", describe_error(error)
            owner.send(outcome)
            owner.recv()  # waits for the end, so that the owner finds what the tool started

        return True, serve


def arguments_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a tool call. Raise ToolProblem if they are not a JSON object."""
    arguments = call["function"].get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise ToolProblem(f"the arguments are not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ToolProblem("the arguments are not a JSON object")
    return arguments


def as_text(result: Any) -> str:
    """Return the result of a tool as the model sees it: a text as it is, and anything else as JSON if possible."""
    try:
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(result)
    text = well_formed(text)
    return text if len(text) <= MAX_RESULT_CHARS else f"{text[:MAX_RESULT_CHARS]}... ({len(text)} characters in all)"
