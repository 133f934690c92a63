"""The job of an agent worker: one event loop that runs the agent functions of many samples. Never imports torch.

The owner sends ("start", session id, base URL, key, prompt) and ("kill", session id). The worker answers each session
with one AgentResult. A thread watches the loop. If an agent function blocks the loop for longer than tool_timeout_s,
this sample gets kind "deadline" and the worker ends, so its other samples start again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any, Literal

from grpo_mega import user_code
from grpo_mega.config.rollout import RolloutConfig
from grpo_mega.rewards.api import as_score
from grpo_mega.rewards.forked import ForkedJob, Serve, describe_error
from grpo_mega.rollout.sessions.chat import Chat, EndpointFailed, LimitReached, as_prompt
from grpo_mega.rollout.sessions.tools import Toolbox

Kind = Literal["returned", "raised", "deadline", "died", "killed"]
Agent = Callable[[Chat, SimpleNamespace], Awaitable[Any]]
BLOCKED_STATUS = 72  # exit status of a worker whose loop was blocked
_TICK_S = 0.2
_session: contextvars.ContextVar[str] = contextvars.ContextVar("session")


@dataclass(frozen=True)
class AgentResult:
    """How the agent function of a sample ended.

    `value` is its reward, or rewards by name; None leaves scoring to rewards.functions. `turn_rewards` are keyed by the
    id of the turn's answer. Kind "died" is an error of the infrastructure. Kind "killed" answers a kill.
    """

    session_id: str
    value: float | dict[str, float] | None
    error: str | None
    kind: Kind
    turn_rewards: dict[str, float] = field(default_factory=dict)


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
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        while not self._ended.is_set():
            self._ticked_at = time.monotonic()
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

    async def _converse(self, session_id: str, base_url: str, api_key: str, prompt: dict[str, Any]) -> None:
        chat, value, error, limit = Chat(base_url, api_key), None, None, asyncio.timeout(self._rollout.agent_timeout_s)
        kind: Kind = "returned"
        try:
            async with limit:
                value = checked_value(await self._agent(chat, as_prompt(prompt)))
        except LimitReached:
            pass
        except EndpointFailed as problem:
            kind, error = "died", str(problem)
        except BaseException as problem:  # SystemExit ends the sample, not the worker
            if session_id in self._killed:
                kind = "killed"
            elif limit.expired():
                kind, error = "deadline", f"no end within rollout.agent_timeout_s={self._rollout.agent_timeout_s:g}"
            else:
                kind, error = "raised", describe_error(problem)
        del self._sessions[session_id]
        for task in self._tasks.pop(session_id, set()) - {asyncio.current_task()}:
            task.cancel()
        self._send(AgentResult(session_id, value, error, kind, chat.turn_rewards))

    def _send(self, result: AgentResult) -> None:
        with self._sending:
            self._owner.send(result)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the worker if one step of the loop takes longer than a tool may."""
        while not self._ended.is_set():
            time.sleep(_TICK_S)
            if time.monotonic() - self._ticked_at < self._rollout.tool_timeout_s + 1.0:
                continue
            task, known = asyncio.current_task(loop), list(self._tasks.items())
            if session_id := next((one for one, tasks in known if task in tasks), None):
                error = f"the agent function blocked its event loop for {self._rollout.tool_timeout_s:g} s; use await"
                self._send(AgentResult(session_id, None, error, "deadline"))
            os._exit(BLOCKED_STATUS)


def checked_value(returned: Any) -> float | dict[str, float] | None:
    """Return the reward or rewards of an agent function. Raise TypeError or ValueError unless they are finite."""
    if not isinstance(returned, dict):
        return None if returned is None else as_score(returned, "").value
    values = {str(name): as_score(value, "").value for name, value in returned.items()}
    return {name: value for name, value in values.items() if value is not None}
