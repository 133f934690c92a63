"""Worker processes as the pool sees them: fork one, send it checks, kill it with everything it started.

Each thread of the pool drives one `Worker`. The pool's `ForkServer` (from multiprocessing) forks all workers. It is a fresh
process with one thread, inherits only the trainer's environment and sys.path, and imports `guardian` first. Neither the server
nor a worker imports the trainer's `__main__`.
"""

import contextlib
import os
import pickle
import signal
import sys
import threading
from multiprocessing import Pipe, connection, forkserver

from grpo_mega import temporary
from grpo_mega.errors import RewardError
from grpo_mega.processes import descendants
from grpo_mega.rewards.workers.worker import GUARDIAN, WARM, Job, Outcome, Request

START_LIMIT_S = 300.0  # limit for a worker's imports; generous because network file systems are slow
_END_LIMIT_S = 60.0  # limit for a killed process to end, which is slow after it has filled gigabytes
_TOO_SLOW = f"a worker took more than {START_LIMIT_S:.0f} s to import its functions; make them lighter"


class ForkServer(forkserver.ForkServer):
    """The process that forks workers. The first fork starts it; a later fork restarts it if it has ended. Thread-safe.

    The kernel ends the server together with the thread that started it, so only threads that live as long as the pool may fork.
    """

    def __init__(self, imports_math_verify: bool) -> None:
        temporary.enter()  # the server listens on a socket below TMPDIR
        super().__init__()
        self.set_forkserver_preload([GUARDIAN, *([WARM] if imports_math_verify else [])])
        self._connecting = threading.Lock()
        self._is_closed = False

    def connect(self, fd: int) -> tuple[int, int]:
        """Request a worker that inherits `fd`. Return (pipe with its process id and later its exit status, pipe for its job).

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
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            self._stop()  # type: ignore[attr-defined]


class WorkerEnded(Exception):
    """The worker ended by itself. The text says how, such as "status 3" or "signal SIGSEGV"."""


class Worker:
    """A worker process that has imported its functions. One thread uses it and finally closes it."""

    def __init__(self, server: ForkServer, job: Job) -> None:
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
            ready = self._ready()
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
            status = self._status()
            raise WorkerEnded("signal SIGKILL" if status is None else _describe(status)) from None
        self.kill()
        return None

    def kill(self) -> None:
        """Kill the worker if it has not ended, and everything that it started, without waiting."""
        if self._is_killed:
            return
        self._is_killed = True
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP)  # stop it first, so it starts no more processes
            for pid in (*descendants(self.pid), self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # processes that an ended worker left behind
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the worker, and close the pipes."""
        self.kill()
        self._connection.close()
        os.close(self._status_fd)

    def _ready(self) -> frozenset[str] | str:
        """Wait for the imports; return the names of group functions, or a problem. EOFError: the server has ended."""
        try:
            return self._connection.recv() if self._has_message(START_LIMIT_S) else _TOO_SLOW
        except (EOFError, OSError):
            status = self._status()
        if status is None:
            raise EOFError
        return f"a worker ended with {_describe(status)} while it imported its functions; its standard error says why"

    def _has_message(self, seconds: float) -> bool:
        """Wait for a message. Raises EOFError if there is none and the process has ended."""
        ready = connection.wait([self._connection, self._status_fd], seconds)
        if self._connection in ready or self._connection.poll():  # the message was in time, even if this thread is late
            return True
        if self._status_fd in ready:
            raise EOFError
        return False

    def _status(self) -> int | None:
        """Kill leftover processes and return the exit status (negative: the signal); None if the server has ended."""
        self.kill()
        with contextlib.suppress(EOFError):
            if connection.wait([self._status_fd], _END_LIMIT_S):
                return forkserver.read_signed(self._status_fd)
        return None


def _describe(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
