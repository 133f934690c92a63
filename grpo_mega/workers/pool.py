"""Warm processes that can be killed: the pool that lends and replaces them, and their jobs (`ForkedJob`).

A `Worker` runs one request at a time, and lives until it ends or exceeds a deadline. A `WorkerPool` keeps workers, each
driven by a thread (`keep`), or lends them (`lend`).

The `ForkServer` (from multiprocessing) is a fresh process with one thread. It inherits only the trainer's environment
and sys.path, and imports `guardian` first. Neither the server nor a forked process imports torch or the trainer's
`__main__`. A forked process ends with its connection or the fork server, even if it hangs.
"""

import contextlib
import gc
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import Pipe, connection, forkserver
from pathlib import Path
from typing import Any, Self

from grpo_mega.errors import UserError, WorkerError
from grpo_mega.processes import die_with_parent, enter_private_folder, kill_session
from grpo_mega.text import well_formed

GUARDIAN = "grpo_mega.workers.guardian"  # the fork server imports it first
MEMORY_LIMIT_BYTES = 4 << 30  # address space limit of a forked process
START_LIMIT_S = 300.0  # limit for the imports of a process; generous because network file systems are slow
_MAX_ERROR_CHARS = 2000
_MAX_STARTS, _PAUSE_S = 5, 0.2  # attempts to start a worker while the fork server keeps ending
_END_LIMIT_S = 60.0  # limit for a killed process to end, which is slow after it has filled gigabytes

Serve = Callable[["connection.Connection[Any, Any]"], None]  # runs until the owner's connection ends


class ForkServer(forkserver.ForkServer):
    """The process that forks others. The first fork starts it; a later fork restarts it if it has ended. Thread-safe.

    The kernel ends the server together with the thread that started it, so only threads that live as long as the pool
    may fork.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """`preload`: modules that the server imports after the guardian."""
        enter_private_folder()  # the server listens on a socket below TMPDIR
        super().__init__()
        self.set_forkserver_preload([GUARDIAN, *preload])
        self._connecting = threading.Lock()
        self._is_closed = False

    def connect(self, fd: int) -> tuple[int, int]:
        """Request a process that inherits `fd`. Return pipes of its process id, later exit status, and of its job.

        Raises WorkerError after `close`, and OSError if the server has ended.
        """
        with self._connecting:
            if self._is_closed:
                raise WorkerError("the pool of workers is closed")
            return self.connect_to_new_process([fd])

    def close(self) -> None:
        """End the server, all forked processes, and everything that they started."""
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
    """A forked process that is ready for its job. One thread receives its messages and finally closes it."""

    def __init__(self, server: ForkServer, job: "ForkedJob") -> None:
        """Fork a process from `server`, and wait until it is ready.

        Raises WorkerError if it cannot import its functions, and OSError or EOFError if the server has ended.
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
                    raise WorkerError(
                        f"a worker took more than {START_LIMIT_S:.0f} s to import its functions; make them lighter"
                    )
                self.ready: Any = self._connection.recv()  # what the job's `prepare` returned, or a problem as text
            except (EOFError, OSError):
                status = self._status()
                if status is None:
                    raise EOFError from None
                problem = f"a worker ended with {status} while it imported its functions"
                raise WorkerError(f"{problem}; its standard error says why") from None
            if isinstance(self.ready, str):
                raise WorkerError(self.ready)
            undo.pop_all()

    @property
    def has_ended(self) -> bool:
        return self._is_killed or bool(connection.wait([self._status_fd], 0))

    def run(self, request: Any, deadline_s: float) -> Any:
        """Send a request, and return the reply. Past the deadline, kill the process and return None.

        Raises WorkerEnded.
        """
        self.send(request)
        reply = self.receive(deadline_s)
        if reply is None:
            self.kill()
        return reply

    def send(self, message: Any) -> None:
        """Send a message. Only one thread may send at a time. Raises WorkerEnded."""
        try:
            self._connection.send(message)
        except (EOFError, OSError):
            raise WorkerEnded(self._status() or "signal SIGKILL") from None

    def receive(self, seconds: float) -> Any:
        """Return the next message; None if there is none within this time. Raises WorkerEnded."""
        try:
            return self._connection.recv() if self._has_message(seconds) else None
        except (EOFError, OSError):
            raise WorkerEnded(self._status() or "signal SIGKILL") from None

    def kill(self) -> None:
        """Kill the process if it has not ended, and everything that it started, without waiting."""
        if not self._is_killed:
            kill_session(self.pid, has_ended=self.has_ended)
        self._is_killed = True

    def close(self) -> None:
        """Kill the process, and close the pipes."""
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
                return describe_status(forkserver.read_signed(self._status_fd))
        return None


class WorkerPool:
    """Warm workers for one job. A worker that ends or is killed is replaced. Thread-safe.

    After a failure, no worker starts. `what` names the workers in its text. `preload`: modules that are imported once,
    for all of them.
    """

    def __init__(self, what: str, job: "ForkedJob", preload: Sequence[str] = ()) -> None:
        self.job = job  # what the next worker gets
        self.workers: list[Worker] = []  # all that live
        self.failure: str | None = None
        self.changed = threading.Condition()  # guards all fields, and those of subclasses
        self._what = what
        self._idle: list[Worker] = []
        self._servers = [ForkServer(preload)]
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def lend(self, server: ForkServer | None = None) -> Iterator[Worker]:
        """Lend an idle worker, or else a new one. Raises WorkerError if it cannot start."""
        with self.changed:
            worker = self._idle.pop() if self._idle else None
        while worker is None or worker.has_ended:
            self._close(worker)
            worker = self._start(server or self._servers[0])
        try:
            yield worker
        finally:
            if worker.has_ended:
                self._close(worker)
            else:
                with self.changed:
                    self._idle.append(worker)

    def keep(
        self,
        drive: Callable[[Worker], None],
        is_wanted: Callable[[], object] = lambda: True,
        *,
        has_server: bool = False,
    ) -> None:
        """Start a thread that passes a worker to `drive`, and another whenever `drive` returns.

        It starts one if `is_wanted()`, which may change when `changed` is notified. `has_server`: its workers may kill
        their fork server, so they share none.
        """
        server = ForkServer() if has_server else self._servers[0]
        self._servers.append(server)
        thread = threading.Thread(target=self._keep, args=(drive, is_wanted, server), name=self._what, daemon=True)
        self._threads.append(thread)
        thread.start()

    def fail(self, text: str) -> None:
        """Start no more workers, for this reason."""
        with self.changed:
            self.failure = self.failure or text
            self.changed.notify_all()

    def close(self) -> None:
        """End all workers, busy or not, and wait until they have ended. May be called twice."""
        self.fail(f"the {self._what} are closed")
        for server in self._servers:
            server.close()
        for thread in self._threads:
            thread.join()
        while self._idle:
            self._close(self._idle.pop())

    def _keep(self, drive: Callable[[Worker], None], is_wanted: Callable[[], object], server: ForkServer) -> None:
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self.failure or is_wanted())
                if self.failure:
                    return
                with self.lend(server) as worker:
                    drive(worker)
        except WorkerError as error:
            self.fail(f"{self._what} cannot start: {error}")
        except Exception as error:
            self.fail(f"a thread of the {self._what} ended with {type(error).__name__}: {error}")

    def _start(self, server: ForkServer) -> Worker:
        """Fork a worker, and wait until it is ready. If the fork server has ended, try again."""
        for _ in range(_MAX_STARTS):
            with contextlib.suppress(OSError, EOFError):
                worker = Worker(server, self.job)
                with self.changed:
                    self.workers.append(worker)
                    self.changed.notify_all()
                return worker
            time.sleep(_PAUSE_S)  # the next attempt restarts the fork server
        raise WorkerError("the process that forks them has ended; its standard error says why")

    def _close(self, worker: Worker | None) -> None:
        if worker is not None:
            with self.changed:
                self.workers.remove(worker)
            worker.close()


@dataclass(frozen=True)
class ForkedJob:
    """The task of a forked process, sent to it through the fork server."""

    code_dir: Path | None  # the config's; user_code.py searches it

    def prepare(self) -> "tuple[Any, Serve]":
        """Import what the job needs. Return the first message to the owner, and what serves the owner afterwards."""
        raise NotImplementedError

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the job in the forked process and return its exit status. The fork server calls this method by name."""
        gc.freeze()  # keeps the server's memory pages shared when the process collects garbage
        inherited = forkserver.get_inherited_fds()
        assert inherited
        os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # only the trainer may keep it open
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if find_spec("socksio") is None:  # httpx then refuses a SOCKS proxy, also for hosts that do not need it
            for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
                if os.environ[name].startswith("socks"):
                    del os.environ[name]
        os.setsid()  # gives the process a process group, so its owner can kill whatever it leaves behind
        with contextlib.suppress(OSError):
            die_with_parent(os.getppid())
        for limit, num_bytes in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MEMORY_LIMIT_BYTES)):
            with contextlib.suppress(OSError, ValueError):  # some systems refuse RLIMIT_AS; the deadline still holds
                resource.setrlimit(limit, (num_bytes, num_bytes))
        # These errors mean that the owner is gone.
        with contextlib.suppress(EOFError, BrokenPipeError), connection.Connection(inherited[0]) as owner:
            try:
                if GUARDIAN not in sys.modules:  # fork servers silently skip modules that they cannot import
                    raise ImportError(
                        "a new Python process cannot import grpo_mega; install it, or set PYTHONPATH to its folder"
                    )
                ready, serve = self.prepare()
            except BaseException as error:
                owner.send(str(error) if isinstance(error, UserError) else describe_error(error))
                return 0
            owner.send(ready)
            serve(owner)
        return 0


def describe_status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def describe_error(error: BaseException) -> str:
    """Return the type, text and location of an exception."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return well_formed(text[:_MAX_ERROR_CHARS]) + (describe_place(frames[-1]) if frames else "")


def describe_place(frame: traceback.FrameSummary) -> str:
    return f" (in {frame.name}, {os.path.basename(frame.filename)}:{frame.lineno})"
