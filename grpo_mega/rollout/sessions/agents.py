"""Agent workers: killable processes that run agent functions and tools, as the engine's process sees them.

`start` gives a sample to the worker with the fewest samples and does not block. `results` gets one AgentResult for each
started session that is not killed. A sample ends at most 5% (at least GRACE_S) later than rollout.agent_timeout_s after
its start. A worker that ends by itself, or must be killed because a sample ignores its deadline, is replaced. Its other
samples get kind "died". Two threads drive each worker.

It is not known which sample ended a worker. So the caller starts all of them again, and says how many may share a
worker: an eighth, then an eighth of these, then one. Only a sample that runs alone has itself to blame. These samples
run in SPARE_WORKERS further workers, which start when they are needed and end when they are empty. In all such a worker
gets no more samples than may share it, so nothing that an ended sample left behind can end a sample that runs alone.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpo_mega.config.rollout import RolloutConfig
from grpo_mega.errors import EngineError
from grpo_mega.rollout.sessions.agent_job import AgentJob
from grpo_mega.rollout.sessions.agent_job import AgentResult as AgentResult
from grpo_mega.workers.pool import Worker, WorkerEnded, WorkerPool

GRACE_S = 0.5  # least time that a sample has to end after its deadline or a kill
_LOOK_S = 0.1  # seconds between looks at deadlines
SPARE_WORKERS = 8  # workers for samples that start again
ANY = sys.maxsize  # any number of samples may share a worker


@dataclass
class _Slot:
    """A worker's place: the sessions that it runs, with the time by which each must have ended."""

    is_spare: bool
    num_started: int = 0  # samples that the worker has got
    most: int = ANY  # samples that it may get
    outbox: queue.SimpleQueue[tuple[Any, ...] | None] = field(default_factory=queue.SimpleQueue)
    ends: dict[str, float] = field(default_factory=dict)
    killed: set[str] = field(default_factory=set)


class AgentWorkers(WorkerPool):
    """Runs agent functions in worker processes; a context manager. `schemas` describe rollout.tools to the model.

    The workers start immediately, in the background. If a worker cannot start, the next `start` raises EngineError.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        code_dir: Path | None,
        schemas: Sequence[dict[str, Any]] = (),
    ) -> None:
        super().__init__("agent workers", AgentJob(code_dir, rollout, tuple(schemas)))
        # None is put by an owner that ends the thread in which it receives results.
        self.results: queue.SimpleQueue[AgentResult | None] = queue.SimpleQueue()
        self._grace_s = max(GRACE_S, 0.05 * rollout.agent_timeout_s)
        self._timeout_s = rollout.agent_timeout_s
        self._name = rollout.agent or "rollout.tools"
        self._slots = [
            _Slot(number >= rollout.agent_workers) for number in range(rollout.agent_workers + SPARE_WORKERS)
        ]
        self._waiting: dict[str, tuple[int, tuple[Any, ...]]] = {}  # samples without a worker, by session
        for slot in self._slots:  # an agent function may kill its worker's parent, too
            self.keep(functools.partial(self._drive, slot), functools.partial(_is_wanted, slot), has_server=True)

    def start(self, session_id: str, base_url: str, api_key: str, prompt: SimpleNamespace, most: int = ANY) -> None:
        """Start the agent function of a sample. `prompt` comes from agent_prompt. Raises EngineError.

        `most`: number of samples that may share its worker. Fewer than ANY if it starts again.
        """
        with self.changed:
            if self.failure is not None:
                raise EngineError(self.failure)
            self._waiting[session_id] = most, ("start", session_id, base_url, api_key, prompt)
            self._place_waiting()

    def kill(self, session_ids: Collection[str]) -> None:
        """End these sessions, and wait until none of them runs. They produce no result. Others may need a restart."""
        with self.changed:
            for session_id in session_ids:
                self._waiting.pop(session_id, None)
            for slot in self._slots:
                for session_id in slot.ends.keys() & set(session_ids):
                    slot.killed.add(session_id)
                    slot.ends[session_id] = time.monotonic() + GRACE_S
                    slot.outbox.put(("kill", session_id))
            self.changed.wait_for(
                lambda: self.failure or not any(one.ends.keys() & set(session_ids) for one in self._slots)
            )

    def _place_waiting(self) -> None:
        """Give each waiting sample to the worker with the fewest samples that may have it, if there is one."""
        for session_id, (most, message) in list(self._waiting.items()):
            slots = [
                slot
                for slot in self._slots
                if slot.is_spare == (most < ANY) and slot.num_started < min(slot.most, most)
            ]
            if slots:
                slot = min(slots, key=lambda one: len(one.ends))
                slot.num_started, slot.most = slot.num_started + 1, min(slot.most, most)
                slot.ends[session_id] = self._latest_end()
                slot.outbox.put(message)
                del self._waiting[session_id]
        self.changed.notify_all()

    def _latest_end(self) -> float:
        return time.monotonic() + self._timeout_s + self._grace_s

    def fail(self, text: str) -> None:
        """Start no more workers, for this reason, which is the result of all samples."""
        with self.changed:
            super().fail(text)
            for session_id in (*self._waiting, *(one for slot in self._slots for one in slot.ends)):
                self.results.put(AgentResult(session_id, None, text, "died"))

    # The workers' threads run everything below.

    def _drive(self, slot: _Slot, worker: Worker) -> None:
        outbox = slot.outbox
        with self.changed:
            slot.ends = dict.fromkeys(slot.ends, self._latest_end())  # they start now
        sender = threading.Thread(target=_send_all, args=(worker, outbox), daemon=True)
        sender.start()
        try:
            self._receive_all(worker, slot)
        finally:
            worker.kill()  # before the sender ends, which may wait for a worker that does not read
            outbox.put(None)
            sender.join()

    def _receive_all(self, worker: Worker, slot: _Slot) -> None:
        """Pass results on until the worker ends or must be killed, and then give the remaining sessions a result."""
        problem = ""
        try:
            while self.failure is None:
                with self.changed:
                    is_overdue = any(end <= time.monotonic() for end in slot.ends.values())
                    if is_overdue or not (slot.ends or slot.most == ANY):
                        problem, slot.most = f"a sample of {self._name} ignored its deadline; use await", 0
                        break
                if isinstance(result := worker.receive(_LOOK_S), AgentResult):
                    self._end(slot, result)
                elif result:
                    problem = result
        except WorkerEnded as ended:
            problem = problem or f"the process of {self._name} ended with {ended}; its standard error may say why"
        with self.changed:
            now, left, slot.outbox = time.monotonic(), list(slot.ends.items()), queue.SimpleQueue()
            slot.num_started, slot.most = 0, ANY
            self._place_waiting()
        for session_id, end in left:
            if end <= now:
                error = f"no end within rollout.agent_timeout_s={self._timeout_s:g}"
                self._end(slot, AgentResult(session_id, None, error, "deadline"))
            else:
                self._end(slot, AgentResult(session_id, None, problem, "died", num_sharing=len(left)))

    def _end(self, slot: _Slot, result: AgentResult) -> None:
        with self.changed:
            if slot.ends.pop(result.session_id, None) is None:
                return
            if result.session_id not in slot.killed and self.failure is None:
                self.results.put(result)
            slot.killed.discard(result.session_id)
            self.changed.notify_all()


def _is_wanted(slot: _Slot) -> bool:
    return bool(slot.ends) or not slot.is_spare


def _send_all(worker: Worker, outbox: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
    """Send messages to a worker until None. The messages for a worker that has ended are lost."""
    with contextlib.suppress(WorkerEnded):
        while (message := outbox.get()) is not None:
            worker.send(message)
