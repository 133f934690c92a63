"""Worker processes as the pool sees them: forked, given checks, killed with all that they have started.

Each thread of the pool drives one `Worker`. All workers of a pool are forked by its `ForkServer`, multiprocessing's, which is a
fresh process: it holds nothing of the trainer but its environment and sys.path, has one thread, and imports `guardian` first.
Neither it nor a worker imports the trainer's `__main__`.
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

START_LIMIT_S = 300.0  # for a worker's imports; generous, since network file systems are slow
_END_LIMIT_S = 60.0  # for the end of a killed process, which takes long where it has filled gigabytes
_TOO_SLOW = f"a worker took more than {START_LIMIT_S:.0f} s to import its functions; make them lighter"


class ForkServer(forkserver.ForkServer):
    """The process that forks workers, started by the first fork and again where it has ended. For several threads at once.

    The kernel ends the server with the thread that started it, so only threads that live as long as the pool may fork.
    """

    def __init__(self, imports_math_verify: bool) -> None:
        temporary.enter()  # the server listens on a socket below TMPDIR
        super().__init__()
        self.set_forkserver_preload([GUARDIAN, *([WARM] if imports_math_verify else [])])
        self._connecting = threading.Lock()
        self._is_closed = False

    def connect(self, fd: int) -> tuple[int, int]:
        """Request a worker that inherits `fd`. Return the pipe with its process id and, later, its exit status, and the pipe
        for its job. Raises RewardError after `close`, OSError where the server has ended."""
        with self._connecting:
            if self._is_closed:
                raise RewardError("the reward pool is closed")
            return self.connect_to_new_process([fd])

    def close(self) -> None:
        """End the server, all workers and everything that they have started."""
        with self._connecting:
            self._is_closed = True
            pid: int | None = self._forkserver_pid  # type: ignore[attr-defined]
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            self._stop()  # type: ignore[attr-defined]


class WorkerEnded(Exception):
    """The worker has ended by itself; the text says how, such as "status 3" or "signal SIGSEGV"."""


class Worker:
    """A worker process that has imported its functions; used by one thread, which closes it in the end."""

    def __init__(self, server: ForkServer, job: Job) -> None:
        """Have `server` fork it, and wait until it is ready.

        Raises RewardError where it cannot import its functions, OSError or EOFError where the server has ended.
        """
        self._connection, theirs = Pipe()
        self._is_killed = False
        with contextlib.ExitStack() as undo:
            undo.callback(self._connection.close)
            with theirs:
                self._status_fd, job_fd = server.connect(theirs.fileno())
            undo.callback(os.close, self._status_fd)
            with open(job_fd, "wb") as stream:
                pickle.dump({"sys_path": [path or os.getcwd() for path in sys.path]}, stream)  # and no __main__
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
        """Return the outcome of each sample; None past the deadline, when the worker is killed.

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
        """Kill it, if it has not ended, and all that it started; do not wait for their end."""
        if self._is_killed:
            return
        self._is_killed = True
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGSTOP)  # so that it starts nothing in the meantime
            for pid in (*descendants(self.pid), self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what a worker that has ended by itself left behind
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it, and free the pipes."""
        self.kill()
        self._connection.close()
        os.close(self._status_fd)

    def _ready(self) -> frozenset[str] | str:
        """Wait until it has imported its functions; return those that take groups, or a problem. EOFError: it has ended."""
        try:
            return self._connection.recv() if self._has_message(START_LIMIT_S) else _TOO_SLOW
        except (EOFError, OSError):
            status = self._status()
        if status is None:
            raise EOFError
        return f"a worker ended with {_describe(status)} while it imported its functions; its standard error says why"

    def _has_message(self, seconds: float) -> bool:
        """Wait for a message. Raises EOFError where there is none and the process has ended."""
        ready = connection.wait([self._connection, self._status_fd], seconds)
        if self._connection in ready or self._connection.poll():  # it was in time, however late this thread is
            return True
        if self._status_fd in ready:
            raise EOFError
        return False

    def _status(self) -> int | None:
        """Return the exit status (negative: the signal), after killing what may be left; None if the server has ended."""
        self.kill()
        with contextlib.suppress(EOFError):
            if connection.wait([self._status_fd], _END_LIMIT_S):
                return forkserver.read_signed(self._status_fd)
        return None


def _describe(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
