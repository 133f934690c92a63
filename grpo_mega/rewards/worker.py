"""Reward workers: processes that run one check at a time, as the pool sees them (`Worker`) and from inside (`Job`).

The pool's `ForkServer` (from multiprocessing) forks all workers. It is a fresh process with one thread, inherits only
the trainer's environment and sys.path, and imports `guardian` first, then math-verify if a check needs it. Neither the
server nor a worker imports torch or the trainer's `__main__`. Each thread of the pool drives one `Worker`.

After importing all functions, a worker sends the names of the functions that take groups, or the reason why it cannot
start. For each request (function name, pickled samples, pickled group data or None) it sends the outcome of every
sample. The worker ends with the connection or the fork server, even during a check that hangs.

pebble 5.2.3 (a library of killable process pools) was tried instead. It ends a hanging worker by SIGTERM, waits 3 s,
then kills it, so six hangs on two workers took 4.1 to 4.6 times their deadlines (this code: 1.13 to 1.17). Processes
that a check started survived the check, and all of them, the workers and the server survived a killed run. Its workers
import the trainer's `__main__`, with torch. It has one pipe for all workers, so it can neither retry a check first nor
drop a queued one.
"""

import contextlib
import gc
import importlib
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import Pipe, connection, forkserver
from pathlib import Path

from grpo_mega import processes
from grpo_mega.config.rewards import RewardsConfig
from grpo_mega.errors import RewardError, UserError
from grpo_mega.processes import descendants, die_with_parent
from grpo_mega.rewards import registry
from grpo_mega.rewards.api import NoScore, RewardFunction, Score, as_score
from grpo_mega.text import well_formed

# The fork server preloads them.
GUARDIAN, MATH_VERIFY = "grpo_mega.rewards.guardian", "grpo_mega.rewards.math.mathverify"
MEMORY_LIMIT_BYTES = 4 << 30  # address space limit of a worker
START_LIMIT_S = 300.0  # limit for a worker's imports; generous because network file systems are slow
_END_LIMIT_S = 60.0  # limit for a killed process to end, which is slow after it has filled gigabytes
_MAX_ERROR_CHARS = 2000
_OUT_OF_MEMORY_STATUS = 71

Outcome = tuple[Score, str | None]  # score, and the text of the exception if any
Request = tuple[str, list[bytes], bytes | None]


class ForkServer(forkserver.ForkServer):
    """The process that forks workers. The first fork starts it; a later fork restarts it if it has ended. Thread-safe.

    The kernel ends the server together with the thread that started it, so only threads that live as long as the pool
    may fork.
    """

    def __init__(self, imports_math_verify: bool) -> None:
        processes.enter_private_folder()  # the server listens on a socket below TMPDIR
        super().__init__()
        self.set_forkserver_preload([GUARDIAN, *([MATH_VERIFY] if imports_math_verify else [])])
        self._connecting = threading.Lock()
        self._is_closed = False

    def connect(self, fd: int) -> tuple[int, int]:
        """Request a worker that inherits `fd`. Return (pipe with its process id and later its exit status, pipe for its
        job).

        Raises RewardError after `close`, and OSError if the server has ended.
        """
        with self._connecting:
            if self._is_closed:
                raise RewardError("the reward pool is closed")
            return self.connect_to_new_process([fd])

    def close(self) -> None:
        """End the server, all workers, and everything that they started."""
        with self._connecting:
            self._is_closed = True
            pid: int | None = self._forkserver_pid  # type: ignore[attr-defined]
            if pid is not None:
                _kill(pid, signal.SIGTERM)
            self._stop()  # type: ignore[attr-defined]


class WorkerEnded(Exception):
    """The worker ended by itself. The text says how, such as "status 3" or "signal SIGSEGV"."""


class Worker:
    """A worker process that has imported its functions. One thread uses it and finally closes it."""

    def __init__(self, server: ForkServer, job: "CheckJob") -> None:
        """Fork a worker from `server`, and wait until it is ready.

        Raises RewardError if it cannot import its functions, and OSError or EOFError if the server has ended.
        """
        self._connection, theirs = Pipe()
        self._is_killed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._connection.close)
            with theirs:
                self._status_fd, job_fd = server.connect(theirs.fileno())
            undo.callback(os.close, self._status_fd)
            with open(job_fd, "wb") as stream:
                pickle.dump({"sys_path": [path or os.getcwd() for path in sys.path]}, stream)  # does not send __main__
                pickle.dump(job, stream)
            self.pid = forkserver.read_signed(self._status_fd)
            undo.callback(self.kill)
            try:
                if not self._has_message(START_LIMIT_S):
                    raise RewardError(
                        f"a worker took more than {START_LIMIT_S:.0f} s to import its functions; make them lighter"
                    )
                ready: frozenset[str] | str = self._connection.recv()  # the names of group functions, or a problem
            except (EOFError, OSError):
                status = self._status()
                if status is None:
                    raise EOFError from None
                problem = f"a worker ended with {status} while it imported its functions"
                raise RewardError(f"{problem}; its standard error says why") from None
            if isinstance(ready, str):
                raise RewardError(ready)
            self.of_groups = ready
            undo.pop_all()

    @property
    def has_ended(self) -> bool:
        return bool(connection.wait([self._status_fd], 0))

    def run(self, request: Request, deadline_s: float) -> list[Outcome] | None:
        """Return the outcome of each sample. Past the deadline, kill the worker and return None.

        Raises WorkerEnded.
        """
        try:
            self._connection.send(request)
            if self._has_message(deadline_s):
                return self._connection.recv()
        except (EOFError, OSError):
            raise WorkerEnded(self._status() or "signal SIGKILL") from None
        self.kill()
        return None

    def kill(self) -> None:
        """Kill the worker if it has not ended, and everything that it started, without waiting."""
        if self._is_killed:
            return
        self._is_killed = True
        if not self.has_ended:
            _kill(self.pid, signal.SIGSTOP)  # stop it first, so it starts no more processes
            for pid in (*descendants(self.pid), self.pid):
                _kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # processes that an ended worker left behind
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker, and close the pipes."""
        self.kill()
        self._connection.close()
        os.close(self._status_fd)

    def _has_message(self, seconds: float) -> bool:
        """Wait for a message. Raises EOFError if there is none and the process has ended."""
        ready = connection.wait([self._connection, self._status_fd], seconds)
        if self._connection in ready or self._connection.poll():  # the message was in time, even if this thread is late
            return True
        if self._status_fd in ready:
            raise EOFError
        return False

    def _status(self) -> str | None:
        """Kill leftover processes and return how the worker ended; None if the server has ended."""
        self.kill()
        with contextlib.suppress(EOFError):
            if connection.wait([self._status_fd], _END_LIMIT_S):
                status = forkserver.read_signed(self._status_fd)
                return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return None


@dataclass(frozen=True)
class CheckJob:
    """The task of a worker, sent to it through the fork server."""

    rewards: RewardsConfig
    is_replacement: bool  # True if it replaces a worker that ended during the run
    code_dir: Path | None = None  # the config's; user_code.py searches it

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the job in the forked process and return its exit status. The fork server calls this method by name."""
        gc.freeze()  # keeps the server's memory pages shared when the worker collects garbage
        inherited = forkserver.get_inherited_fds()
        assert inherited
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # only the trainer may keep it open
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.setsid()  # gives the worker a process group, so the pool can kill whatever a check leaves behind
        with contextlib.suppress(OSError):
            die_with_parent(os.getppid())
        for limit, num_bytes in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MEMORY_LIMIT_BYTES)):
            with contextlib.suppress(OSError, ValueError):  # some systems refuse RLIMIT_AS; the deadline still holds
                resource.setrlimit(limit, (num_bytes, num_bytes))
        # These errors mean that the pool is gone.
        with contextlib.suppress(EOFError, BrokenPipeError), connection.Connection(inherited[0]) as pool:
            try:
                functions = self._import()
            except BaseException as error:
                pool.send(str(error) if isinstance(error, UserError) else describe_error(error))
                return 0
            pool.send(frozenset(name for name, function in functions.items() if registry.takes_groups(function)))
            forms = {f.name: "text" if f.name in registry.BUILT_IN else f.completions for f in self.rewards.functions}
            while True:
                name, samples, group = pool.recv()
                pool.send(_run(functions[name], samples, group, forms.get(name, "text")))
        return 0

    def _import(self) -> dict[str, RewardFunction]:
        if GUARDIAN not in sys.modules:  # fork servers silently skip modules that they cannot import
            raise ImportError(
                "a new Python process cannot import grpo_mega; install it, or set PYTHONPATH to its folder"
            )
        functions: dict[str, RewardFunction] = {}
        options_of = {function.name: function.options for function in self.rewards.functions}
        for name in dict.fromkeys(registry.ACCURACY if name in registry.JUDGED else name for name in options_of):
            options = options_of.get(name, {})
            functions[name] = registry.bind(name, options, self.rewards.step_splitter, self.code_dir)
            if name == registry.ACCURACY:
                importlib.import_module(MATH_VERIFY)  # reports why the fork server could not import it
            elif name == "reward_model" and not self.is_replacement:  # a restarting server must not end the run
                from grpo_mega.rewards.reward_model import check_reachable

                check_reachable(options)
        return functions


def _run(function: RewardFunction, pickled: list[bytes], group: bytes | None, form: str) -> list[Outcome]:
    try:
        samples = [pickle.loads(sample) for sample in pickled]
        if group is None:
            returned = [function(*samples[0])]
        else:
            given, token_ids = pickle.loads(group)
            returned = registry.call_group(function, samples, given, token_ids, form)
        outcomes: list[Outcome] = []
        for value, (_, response, _, _) in zip(returned, samples, strict=True):
            try:
                outcomes.append((as_score(value, response), None))
            except Exception as error:
                outcomes.append(_failed(error))
        return outcomes
    except MemoryError:
        os._exit(_OUT_OF_MEMORY_STATUS)  # the heap is full, so only a fresh process can continue
    except BaseException as error:  # SystemExit and similar end the check, not the worker
        return [_failed(error)] * len(pickled)


def _failed(error: BaseException) -> Outcome:
    return Score(None if isinstance(error, NoScore) else 0.0, "error"), describe_error(error)


def describe_error(error: BaseException) -> str:
    """Return the type, text and location of an exception."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (in {frames[-1].name}, {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return well_formed(text[:_MAX_ERROR_CHARS]) + place


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
