"""A pool of killable processes that score samples while sampling goes on.

Input: samples by `submit`, which does not block. Output: a RewardResult each by `collect`, which waits for all. Invariants:
every check (one sample, one function) ends within `deadline_s` of its start, by SIGKILL if need be; a check that hangs, crashes
or raises costs its own score only; no worker outlives the pool or its process; no worker holds anything of the parent but
its sys.path and environment. One daemon thread does all the work with the processes; the methods only touch queues.

The accuracy reward's verdict depends on two short texts alone, the normalized answers, and is often found without math-verify.
So `submit` looks for it by `quick` and among the verdicts so far, and samples with the same texts wait for one check. Only a
score is shared: where that check hangs or crashes, the next of them is checked by itself.
"""

import contextlib
import os
import pickle
import selectors
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from grpo_mega.errors import ConfigError, RewardError
from grpo_mega.rewards import registry
from grpo_mega.rewards.api import Score, Step
from grpo_mega.rewards.math.answer import whole_turn
from grpo_mega.rewards.math.quick import quick
from grpo_mega.rewards.results import RewardResult, result_of
from grpo_mega.rewards.workers.checks import Check, Checks
from grpo_mega.rewards.workers.process import Template, WorkerProcess
from grpo_mega.rewards.workers.protocol import FAILED, RAISED, READY, SCORED, Setup, frame

ACCURACY = "accuracy"
SECONDS_BETWEEN_LOOKS = 1.0  # while results are waited for
START_LIMIT_S = 300.0  # for a worker's imports; generous, since network file systems are slow
_TOO_SLOW = f"a reward worker took more than {START_LIMIT_S:.0f} s to import its functions; make them lighter"
MEMORY_LIMIT_BYTES = 4 << 30  # address space of one worker


@dataclass
class _Pending:
    payload: bytes
    outcomes: dict[str, Score] = field(default_factory=dict)


class RewardPool:
    """Runs reward functions in worker processes; a context manager.

    Args:
        functions: (name, weight) pairs; names as in `registry`.
        num_workers: processes, each with one check at a time; 0 where nothing will be submitted.
        deadline_s: seconds for one check, from when a worker gets it (neither queueing nor start-up count).
        memory_limit_bytes: address space of a worker; None for functions that need more, such as a model's.
        options: keyword arguments of the functions, by name.
        step_splitter: where steps end, for the functions that ask (see `steps`).

    The workers start at once, in the background. Raises ConfigError for what is wrong with the arguments; what goes wrong in
    the workers' start-up is raised as RewardError by the next `submit` or `collect`.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, float]],
        num_workers: int,
        deadline_s: float,
        memory_limit_bytes: int | None = MEMORY_LIMIT_BYTES,
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        step_splitter: str = "blank-lines",
    ) -> None:
        _check_arguments(functions, num_workers, deadline_s)
        options = {name: dict((options or {}).get(name, {})) for name, _ in functions}
        for name, given in options.items():
            registry.check(name, given, step_splitter, deadline_s)
        self._weights = dict(functions)
        self._names = tuple(self._weights)
        self._num_workers = num_workers
        self._deadline_s = deadline_s
        sys_path = tuple(p or os.getcwd() for p in sys.path)
        self._setup = Setup(options, step_splitter, sys_path, memory_limit_bytes, os.getpid())

        self._changed = threading.Condition()  # guards everything up to the blank line
        self._checks = Checks()
        self._pending: dict[Hashable, _Pending] = {}
        self._unfinished = 0  # outcomes
        self._raised: dict[str, dict[Hashable, str]] = {}  # this collect's exceptions by function and key
        self._counters: Counter[str] = Counter(killed_workers=0)
        self._first_error: str | None = None
        self._failure: str | None = None
        self._is_ready = num_workers == 0  # a worker has imported all functions
        self._is_closing = False

        self._template: Template | None = None  # the thread's own, like the workers and the selector
        self._workers: list[WorkerProcess] = []
        self._num_started = 0
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._serve, name="reward-pool", daemon=True)
        self._thread.start()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def counters(self) -> dict[str, int]:
        """Checks by verdict since the pool began, and "killed_workers"."""
        with self._changed:
            return dict(self._counters)

    @property
    def first_error(self) -> str | None:
        """The first exception or crash since the pool began, with the function's name."""
        with self._changed:
            return self._first_error

    @property
    def worker_pids(self) -> list[int]:
        """The process ids of the workers of this moment."""
        return [worker.pid for worker in list(self._workers)]

    def wait_until_ready(self) -> None:
        """Until a worker has imported all functions. Raises RewardError if the workers cannot start."""
        with self._changed:
            while not self._is_ready and self._failure is None:
                self._changed.wait()
            self._raise_failure()

    def submit(self, key: Hashable, prompt: str, response: str, answer: str, extras: dict[str, Any]) -> None:
        """Queues one sample for all functions; `key` is its name in what `collect` returns, and new to it."""
        assert self._num_workers, "a pool without workers"
        score, texts = quick(whole_turn(response, extras), answer) if ACCURACY in self._weights else (None, None)
        is_known = score is not None and len(self._names) == 1
        payload = b"" if is_known else pickle.dumps((prompt, response, answer, extras))
        with self._changed:
            self._raise_failure()
            if key in self._pending:
                raise ValueError(f"key {key!r} is submitted twice before a collect")
            self._pending[key] = _Pending(payload)
            self._unfinished += len(self._names)
            if texts is not None:
                score = self._checks.known(texts)
            for name in self._names:
                if name == ACCURACY and score is not None:
                    self._record(key, name, score)
                else:
                    self._checks.add(Check(name, [key], texts if name == ACCURACY else None))
                    self._wake()

    def discard(self, keys: Collection[Hashable]) -> None:
        """Forgets samples submitted since the last collect. A check of theirs that has begun ends, and counts for nothing; so
        their keys may not be used again."""
        with self._changed:
            forgotten = {key: self._pending.pop(key) for key in keys}
            self._checks.forget(forgotten)
            self._unfinished -= sum(len(self._names) - len(sample.outcomes) for sample in forgotten.values())
            for errors in self._raised.values():
                for key in forgotten:
                    errors.pop(key, None)

    def collect(self, on_progress: Callable[[], None] = lambda: None) -> dict[Any, RewardResult]:
        """Waits for all samples submitted since the last collect; their results in the order of submission.

        While it waits, `on_progress()` is called from the caller's thread whenever checks have finished.

        Raises:
            RewardError: the workers cannot start.
        """
        with self._changed:
            while (before := self._unfinished) and self._failure is None:
                self._changed.wait(SECONDS_BETWEEN_LOOKS)
                if self._unfinished < before:
                    on_progress()
            self._raise_failure()
            pending, self._pending = self._pending, {}
            raised, self._raised = self._raised, {}
        errors = {key: {name: texts[key] for name, texts in raised.items() if key in texts} for key in pending}
        return {key: result_of(self._weights, sample.outcomes, errors[key]) for key, sample in pending.items()}

    def close(self) -> None:
        """Ends all workers, busy or not, and waits for their end; may be called twice."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._failure = self._failure or "the reward pool is closed; submit before close()"
            self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RewardError(self._failure)

    def _record(self, key: Hashable, name: str, score: Score, error: str | None = None) -> None:
        """One outcome; `error` is the text of the exception that was raised, if any."""
        if key not in self._pending:  # it was discarded
            return
        self._pending[key].outcomes[name] = score
        self._counters[score.verdict] += 1
        if error is not None:
            self._raised.setdefault(name, {})[key] = error
            self._first_error = self._first_error or f"{name}: {error}"
        self._unfinished -= 1
        if not self._unfinished:
            self._changed.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread is to wake already
            os.write(self._wake_write, b"\0")

    # The thread: everything below runs in it.

    def _serve(self) -> None:
        try:
            self._selector.register(self._wake_read, selectors.EVENT_READ)
            while not self._is_closing and self._failure is None:
                self._start_what_is_missing()
                self._dispatch()
                # Replies before deadlines: a reply that waits in its pipe was in time, however late this thread is.
                for key, _ in self._selector.select(self._seconds_to_next_deadline()):
                    if key.fd == self._wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake_read, 4096)
                    elif key.data is self._template and self._template is not None:
                        self._hear(self._template)
                    elif key.data in self._workers:
                        self._exchange(key.data)
                self._kill_overdue()
        except Exception as error:
            self._fail(f"the reward pool's thread ended with {type(error).__name__}: {error}")
        finally:
            if self._template is not None:
                self._template.kill()
            for worker in list(self._workers):
                self._release(worker).close()
            self._selector.close()

    def _start_what_is_missing(self) -> None:
        if self._template is None and self._num_workers:
            self._template = Template(self._setup)
            self._selector.register(self._template.fd, selectors.EVENT_READ, self._template)
        while self._template is not None and self._template.is_ready and len(self._workers) < self._num_workers:
            worker = self._template.fork(is_replacement=self._num_started >= self._num_workers)
            if worker is None:
                return  # it has ended, which `_hear` will hear
            self._num_started += 1
            self._workers.append(worker)
            self._selector.register(worker.output_fd, selectors.EVENT_READ, worker)

    def _hear(self, template: Template) -> None:
        """What the template says of its start, or that it has ended: then all begins anew, but for the checks under way."""
        match template.receive():
            case (kind,) if kind == READY:
                template.is_ready = True
            case (kind, text) if kind == FAILED:
                self._fail(f"reward workers cannot start: {text}")
            case _:
                for worker in list(self._workers):
                    self._bury(worker)
                self._selector.unregister(template.fd)
                self._template = None
                cause = _cause(template.kill())
                if not template.is_ready:
                    self._fail(f"reward workers cannot start: their template ended with {cause}; its standard error says why")

    def _dispatch(self) -> None:
        for worker in self._workers:
            if not worker.is_ready or worker.check is not None:
                continue
            with self._changed:
                check = self._checks.next()
                if check is None:
                    return
                payload = self._pending[check.keys[0]].payload
            worker.check, worker.started_at = check, time.monotonic()
            worker.send(frame(check.name.encode()) + frame(payload))
            self._watch(worker)

    def _exchange(self, worker: WorkerProcess) -> None:
        """Sends what is unsent and handles what has come from one worker."""
        if worker.has_unsent:
            worker.send()
            self._watch(worker)
        messages = worker.receive()
        if messages is None:
            self._bury(worker)
            return
        for kind, *rest in messages:
            if kind == READY:
                worker.is_ready = True
                with self._changed:
                    self._is_ready = True
                    self._changed.notify_all()
            elif kind == FAILED:
                self._fail(f"reward workers cannot start: {rest[0]}")
            elif kind == SCORED:
                self._finish(worker, Score(rest[0], rest[1], tuple(Step(end, value) for end, value in rest[2])), is_own=True)
            elif kind == RAISED:
                self._finish(worker, Score(rest[1], "error"), error=rest[0])

    def _finish(self, worker: WorkerProcess, score: Score, is_own: bool = False, error: str | None = None) -> None:
        """Records the outcome of the worker's check; `is_own` if the function gave the score."""
        assert worker.check is not None
        check, worker.check = worker.check, None
        with self._changed:
            for key in self._checks.finish(check, score if is_own else None):
                self._record(key, check.name, score, error)

    def _bury(self, worker: WorkerProcess) -> None:
        """Forgets a worker that ended by itself; its check, if it had one, is an "error"."""
        status = self._release(worker).end()
        if not worker.is_ready and self._template is not None and self._template.is_alive:
            self._fail(f"a reward worker ended with {_cause(status)} while starting; its standard error says why")
            return
        if worker.check is not None:
            with self._changed:
                crash = f"{worker.check.name}: the worker process ended with {_cause(status)}"
                self._first_error = self._first_error or crash
            self._finish(worker, Score(0.0, "error"))

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if now < self._deadline(worker):
                continue
            self._release(worker).leave()
            if worker.check is None:
                self._fail(_TOO_SLOW)
                continue
            with self._changed:
                self._counters["killed_workers"] += 1
            self._finish(worker, Score(0.0, "timeout"))
        if now >= self._start_deadline():
            self._fail(_TOO_SLOW)

    def _start_deadline(self) -> float:
        is_starting = self._template is not None and not self._template.is_ready
        return self._template.started_at + START_LIMIT_S if self._template is not None and is_starting else float("inf")

    def _deadline(self, worker: WorkerProcess) -> float:
        if worker.check is not None:
            return worker.started_at + self._deadline_s
        return float("inf") if worker.is_ready else worker.started_at + START_LIMIT_S

    def _seconds_to_next_deadline(self) -> float | None:
        soonest = min([self._start_deadline(), *map(self._deadline, self._workers)])
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _watch(self, worker: WorkerProcess) -> None:
        """Waits for room in the worker's pipe exactly while something is unsent."""
        is_watched = worker.input_fd in self._selector.get_map()
        if worker.has_unsent and not is_watched:
            self._selector.register(worker.input_fd, selectors.EVENT_WRITE, worker)
        elif is_watched and not worker.has_unsent:
            self._selector.unregister(worker.input_fd)

    def _release(self, worker: WorkerProcess) -> WorkerProcess:
        for fd in (worker.output_fd, worker.input_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        self._workers.remove(worker)
        return worker

    def _fail(self, text: str) -> None:
        with self._changed:
            self._failure = self._failure or text
            self._changed.notify_all()


def _check_arguments(functions: Sequence[tuple[str, float]], num_workers: int, deadline_s: float) -> None:
    names = [name for name, _ in functions]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"reward function {name!r} is given twice; give it once, with its total weight")
    if not names:
        raise ConfigError("rewards.functions is empty; name at least one, for example accuracy")
    if num_workers < 0:
        raise ConfigError(f"rewards.num_workers={num_workers}; use at least 1")
    if not deadline_s > 0:
        raise ConfigError(f"rewards.deadline_s={deadline_s}; use a positive number of seconds")


def _cause(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
