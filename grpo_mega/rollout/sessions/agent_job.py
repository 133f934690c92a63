"""The job of an agent worker: one event loop that runs the agent functions of many samples. Never imports torch.

The owner sends ("start", session id, base URL, key, prompt) and ("kill", session id). The worker answers each session
with one AgentResult. A thread watches the loop. If agent functions block the loop for longer than tool_timeout_s, the
worker sends a text with the line that was running, and ends.

An agent function gets `chat`, a client of the sample's endpoint, and `prompt`, the row of the dataset:

    async def run(chat, prompt):
        message = await chat([*prompt.messages, {"role": "user", "content": "Guess."}], max_tokens=20)
        chat.reward(0.1)
        return 1.0 if prompt.answer in message["content"] else 0.0

Tools are Python functions that the model calls. A tool that is a coroutine function runs in the worker's event loop.
Any other tool runs in a process that is forked for this one call and killed after it, with everything that it started.
So a tool that hangs, crashes or exits costs only its deadline. At most MAX_CALLS such calls run at once. The calls are
forked from warm processes, one per concurrent call, that have imported the tools. If an import starts threads or
processes, these cannot be forked with it: such a process runs one call itself, and is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import faulthandler
import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import aiohttp

from grpo_mega import user_code
from grpo_mega.config.rollout import BUILT_IN_TOOLS, RolloutConfig
from grpo_mega.errors import UserError
from grpo_mega.processes import adopt_orphans, descendants, die_with_parent, kill_descendants, kill_session
from grpo_mega.rewards.api import as_score
from grpo_mega.text import well_formed
from grpo_mega.types import Prompt
from grpo_mega.workers.pool import (
    ForkedJob,
    Serve,
    WorkerEnded,
    WorkerPool,
    describe_error,
    describe_place,
    describe_status,
)

# Codes of the endpoint's errors: the sample has reached a limit, so no further turn can be sampled.
LIMIT_CODES = frozenset({"max_turns", "max_response_length", "context_length_exceeded"})


class LimitReached(Exception):
    """The sample has reached max_turns or max_response_length. An agent function may leave it uncaught."""


class RefusedRequest(ValueError):
    """The endpoint refuses a request of the agent function."""


class EndpointFailed(ConnectionError):
    """The endpoint does not answer. The sample is not to blame, and starts again."""


class Chat:
    """A client of one sample's conversation."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key  # for any other OpenAI client
        self.finish_reason: str | None = None  # why the last turn ended: stop, length or tool_calls
        self.turn_rewards: dict[str, float] = {}  # by the id of the turn's answer
        self._last_id: str | None = None

    async def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """Sample one assistant turn, and return its message.

        `sampling` may have max_tokens and stop; other keys must have the run's values. Raises LimitReached if the
        sample may have no further turn.
        """
        body = {"model": "policy", "messages": list(messages), **({"tools": list(tools)} if tools else {}), **sampling}
        answer = await post(f"{self.base_url}/chat/completions", self.api_key, body)
        self._last_id, choice = answer["id"], answer["choices"][0]
        self.finish_reason = choice["finish_reason"]
        return dict(choice["message"])

    def reward(self, value: float, answer_id: str | None = None) -> None:
        """Set the reward of the last turn of `chat`, or of the turn whose answer has this id (of another client)."""
        turn = answer_id or self._last_id
        if turn is None:
            raise ValueError("chat.reward needs a turn; call chat first")
        number = as_score(value, "").value
        if number is not None:
            self.turn_rewards[turn] = number


async def post(url: str, api_key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send JSON to the endpoint, and return the JSON answer. Raise LimitReached, RefusedRequest or EndpointFailed."""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client,  # the sample has a deadline
            client.post(url, json=body, headers={"Authorization": f"Bearer {api_key}"}) as response,
        ):
            code, answer = response.status, await response.json(content_type=None)
    except (OSError, aiohttp.ClientError, ValueError) as error:
        raise EndpointFailed(f"the sample's endpoint does not answer ({type(error).__name__}: {error})") from None
    if code == 200 and isinstance(answer, dict):
        return answer
    problem = answer.get("error", {}) if isinstance(answer, dict) else {}
    if problem.get("code") in LIMIT_CODES:
        raise LimitReached(problem.get("message"))
    if code >= 500:
        raise EndpointFailed(f"the sample's endpoint failed with status {code}: {problem.get('message')}")
    raise RefusedRequest(problem.get("message") or f"status {code}")


def agent_prompt(prompt: Prompt) -> SimpleNamespace:
    """Return what an agent function sees of a prompt: messages, answer, columns, and each column that is not called
    like one of them.
    """
    columns = prompt.extras | {name: value for name, value in prompt.raw_columns.items() if name != "prompts"}
    own = {"messages": prompt.messages, "answer": prompt.answer, "columns": columns}
    return SimpleNamespace(**{str(name): value for name, value in columns.items()} | own)


MAX_CALLS = 32
MAX_RESULT_CHARS = 20_000


def load_tool(name: str, code_dir: Path | None) -> Callable[..., Any]:
    """Return the function of a tool. Raise ConfigError if it cannot be imported."""
    return user_code.load_function(BUILT_IN_TOOLS.get(name, name), code_dir)


class Toolbox:
    """The tools of a run, keyed by the names of their functions."""

    def __init__(self, names: Sequence[str], code_dir: Path | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        loaded = {name: load_tool(name, code_dir) for name in names}
        self._functions = {function.__name__: function for function in loaded.values()}
        forked = {f.__name__: name for name, f in loaded.items() if not inspect.iscoroutinefunction(f)}
        self._job = ToolJob(code_dir, forked)
        modules = [BUILT_IN_TOOLS.get(name, name).rpartition(".")[0] for name in forked.values() if ":" not in name]
        self._pool = WorkerPool("tools", self._job, [__name__, *modules])
        # Its threads live as long as the agent's worker, so the server that one of them starts does too.
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
        if (function := self._functions.get(name)) is None:
            raise ToolProblem(f"there is no tool {name!r}; the tools are {', '.join(self._functions) or 'none'}")
        if name in self._job.names:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._run_forked, name, arguments)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return as_text(await function(**arguments))
        except Exception as error:
            raise self._late(name) if limit.expired() else ToolProblem(describe_error(error)) from None

    def _run_forked(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool in a process that a warm process forks. Raise ToolProblem."""
        try:
            with self._pool.lend() as worker:
                outcome = worker.run((name, arguments), self._timeout_s)
                if not worker.ready:
                    worker.kill()
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
    """Runs each tool call in its own process. The first message tells if the process can run more than one."""

    names: dict[str, str]  # by the function's name

    def prepare(self) -> tuple[bool, Serve]:
        functions = {function: load_tool(name, self.code_dir) for function, name in self.names.items()}
        is_forked = len(os.listdir("/proc/self/task")) == 1 and not descendants(os.getpid())
        with contextlib.suppress(OSError):
            adopt_orphans()

        def serve(owner: connection.Connection[Any, Any]) -> None:
            while True:
                name, arguments = owner.recv()
                run = run_in_fork if is_forked else run_tool
                outcome = run(functions[name], arguments)
                kill_descendants()
                owner.send(outcome)

        return is_forked, serve


def run_tool(function: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    """Return the result as a text, and the problem, if any."""
    try:
        return [as_text(function(**arguments)), ""]
    except BaseException as error:  # SystemExit, too
        return ["", describe_error(error)]


def run_in_fork(function: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    """Call `run_tool` in a forked process, which leads a session. Return when the process has ended."""
    parent, outcome = os.getpid(), os.memfd_create("outcome")
    if not (pid := os.fork()):
        try:
            os.setsid()
            with contextlib.suppress(OSError):
                die_with_parent(parent)
            os.pwrite(outcome, json.dumps(run_tool(function, arguments)).encode(), 0)
        finally:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    kill_session(pid, has_ended=True)
    with open(outcome, "rb") as file:
        file.seek(0)
        return json.loads(file.read() or json.dumps(["", f"the tool's process ended with {describe_status(status)}"]))


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


Kind = Literal["returned", "raised", "deadline", "died", "killed"]
Agent = Callable[[Chat, SimpleNamespace], Awaitable[Any]]
_TICK_S = 0.2
_LOOP_FILES = (__file__, asyncio.events.__file__)  # they call agent functions and tools
_session: contextvars.ContextVar[str] = contextvars.ContextVar("session")


@dataclass(frozen=True)
class AgentResult:
    """How the agent function of a sample ended.

    `value` is its reward, or rewards by name; None leaves scoring to rewards.functions. `turn_rewards` are keyed by the
    id of the turn's answer. Kind "died": another sample of the worker may be to blame. Kind "killed" answers a kill.
    """

    session_id: str
    value: float | dict[str, float] | None
    error: str | None
    kind: Kind
    turn_rewards: dict[str, float] = field(default_factory=dict)
    num_sharing: int = 1  # samples that shared the worker when it ended


@dataclass(frozen=True)
class AgentJob(ForkedJob):
    """The task of an agent worker. `schemas` describe the tools to the model."""

    rollout: RolloutConfig
    schemas: tuple[dict[str, Any], ...]

    def prepare(self) -> tuple[bool, Serve]:
        rollout = self.rollout
        if rollout.agent is None:
            agent = tool_agent(Toolbox(rollout.tools, self.code_dir, rollout.tool_timeout_s), self)
        else:
            agent = user_code.load_function(rollout.agent, self.code_dir)
        return True, lambda owner: asyncio.run(_Loop(self, agent, owner).run())


def tool_agent(toolbox: Toolbox, job: AgentJob) -> Agent:
    """Return the agent function of rollout.tools: answer calls until a turn has none, or the sample ends by a limit."""

    async def run(chat: Chat, prompt: SimpleNamespace) -> None:
        messages = list(prompt.messages)
        for turn in range(job.rollout.max_turns):
            message = await chat(messages, tools=job.schemas)
            calls, invalid = message.get("tool_calls") or [], message.pop("invalid_tool_calls", None) or []
            if not (calls or invalid) or chat.finish_reason == "length" or turn + 1 == job.rollout.max_turns:
                return
            messages.append(message)
            messages += await asyncio.gather(*map(toolbox.answer, calls))
            if invalid:
                lines = [f"Error: this is not a tool call: {one['text'][:200]!r}, {one['error']}" for one in invalid]
                messages.append({"role": "user", "content": "\n".join(lines)})

    return run


class _Loop:
    """The event loop of a worker."""

    def __init__(self, job: AgentJob, agent: Agent, owner: connection.Connection[Any, Any]) -> None:
        self._rollout, self._agent, self._owner = job.rollout, agent, owner
        self._sessions: dict[str, asyncio.Task[None]] = {}
        self._tasks: dict[str, set[asyncio.Task[Any]]] = {}  # what an agent function started, by session
        self._killed: set[str] = set()
        self._sending = threading.Lock()
        self._ticked_at = time.monotonic()

    async def run(self) -> None:
        """Serve until the owner's connection ends."""
        loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        loop.set_task_factory(self._task)
        loop.add_reader(self._owner.fileno(), self._receive)
        threading.Thread(target=self._watch, daemon=True).start()
        while not self._ended.is_set():
            self._ticked_at = time.monotonic()
            # If a function keeps the interpreter's lock, so `_watch` cannot run, print the stack and end the process.
            faulthandler.dump_traceback_later(self._rollout.tool_timeout_s + 2.0, exit=True, file=2)
            await asyncio.sleep(_TICK_S)
        os._exit(0)  # agent functions may ignore that they are cancelled

    def _receive(self) -> None:
        try:
            kind, session_id, *arguments = self._owner.recv()
        except (EOFError, OSError):
            self._ended.set()
            return
        if kind == "start":
            context = contextvars.copy_context()
            context.run(_session.set, session_id)
            self._sessions[session_id] = asyncio.get_running_loop().create_task(
                self._converse(session_id, *arguments), context=context
            )
        elif task := self._sessions.get(session_id):
            self._killed.add(session_id)
            task.cancel()

    def _task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Create a task, and note the session that it belongs to."""
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        context = options.get("context") or contextvars.copy_context()
        if (session_id := context.get(_session)) is not None:
            self._tasks.setdefault(session_id, set()).add(task)
            task.add_done_callback(lambda done: self._tasks.get(session_id, set()).discard(done))
        return task

    async def _converse(self, session_id: str, base_url: str, api_key: str, prompt: SimpleNamespace) -> None:
        chat, value, error, limit = Chat(base_url, api_key), None, None, asyncio.timeout(self._rollout.agent_timeout_s)
        kind: Kind = "returned"
        try:
            async with limit:
                value = checked_value(await self._agent(chat, prompt))
        except LimitReached:
            pass
        except EndpointFailed as problem:
            kind, error = "died", str(problem)
        except BaseException as problem:  # SystemExit ends the sample, not the worker
            if session_id in self._killed:
                kind = "killed"
            elif limit.expired():
                kind, error = "deadline", f"no end within rollout.agent_timeout_s={self._rollout.agent_timeout_s:g}"
            else:  # another sample may have cancelled all tasks, or used all memory
                is_shared = isinstance(problem, (asyncio.CancelledError, MemoryError))
                kind, error = "died" if is_shared else "raised", describe_error(problem)
        num_sharing = len(self._sessions)
        del self._sessions[session_id]
        for task in self._tasks.pop(session_id, set()) - {asyncio.current_task()}:
            task.cancel()
        self._send(AgentResult(session_id, value, error, kind, chat.turn_rewards, num_sharing))

    def _send(self, result: AgentResult | str) -> None:
        with self._sending:
            self._owner.send(result)

    def _watch(self) -> None:
        """End the worker if one step of the loop takes longer than a tool may."""
        while not self._ended.is_set():
            time.sleep(_TICK_S)
            if time.monotonic() - self._ticked_at < self._rollout.tool_timeout_s + 1.0:
                continue
            stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
            while stack[1:] and any(frame.filename in _LOOP_FILES for frame in stack):
                del stack[0]
            own = [frame for frame in stack if "/lib/python" not in frame.filename] or stack
            name, place = self._rollout.agent or "rollout.tools", describe_place(own[-1])
            self._send(f"{name} blocked its event loop for {self._rollout.tool_timeout_s:g} s{place}; use await")
            os._exit(1)


def checked_value(returned: Any) -> float | dict[str, float] | None:
    """Return the reward or rewards of an agent function. Raise TypeError or ValueError unless they are finite."""
    if not isinstance(returned, dict):
        return None if returned is None else as_score(returned, "").value
    values = {str(name): as_score(value, "").value for name, value in returned.items()}
    return {name: value for name, value in values.items() if value is not None}
