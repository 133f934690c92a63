"""The template and the workers as the pool sees them: started, sent checks, read from without blocking, killed.

Used from one thread only, which must live as long as the template does: the kernel ends that with the thread. Each process is
the leader of a session of its own, so that an interrupt from the terminal does not reach it.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo_mega.rewards.workers.protocol import END, FORK, FORK_AGAIN, LEAVE, FrameBuffer, Setup, frame

ANSWER_LIMIT_S = 60.0  # for the template to fork, or to collect a killed process
SECONDS_TO_END = 30.0  # for the template to end all below it
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_READ_SIZE = 1 << 16


class Template:
    """A process of template.py, starting from when this is made; `is_ready` is set by the pool once it says so."""

    def __init__(self, setup: Setup) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not the parent's whole sys.path: set before start-up, a directory of it could shadow the standard library.
        path = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "grpo_mega.rewards.workers.template", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=2,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
        self._control.settimeout(ANSWER_LIMIT_S)
        self.is_ready = False
        self.started_at = time.monotonic()
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stream:  # it ended: `receive` shows that
            stream.write(frame(pickle.dumps(setup)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def fd(self) -> int:
        """What to wait on for its message, and for its end."""
        return self._control.fileno()

    def receive(self) -> Any:
        """Its message, to be called when there is one; None if the process has ended."""
        try:
            data = self._control.recv(_READ_SIZE)
        except ConnectionError:
            return None
        return pickle.loads(data) if data else None

    def fork(self, is_replacement: bool) -> "WorkerProcess | None":
        """A new worker, milliseconds from its first check unless a user's function is to be imported; None if the template has
        ended."""
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        pid = None
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._control, [FORK_AGAIN if is_replacement else FORK], [their_in, their_out])
            pid = self.receive()
        os.close(their_in)
        os.close(their_out)
        if pid is None:
            os.close(our_in)
            os.close(our_out)
            return None
        return WorkerProcess(self, pid, our_out, our_in)

    def end(self, pid: int) -> int:
        """Kills a worker, if it has not ended, and all it started; its exit status (negative: the signal)."""
        with contextlib.suppress(ConnectionError):
            self._control.send(END + str(pid).encode())
            status = self.receive()
            if status is not None:
                return int(status)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # the kernel kills the workers of a template that has ended, but not their children
        return -signal.SIGKILL

    def leave(self, pid: int) -> None:
        """As `end`, without waiting for what takes long after a check that filled gigabytes."""
        with contextlib.suppress(ConnectionError):
            self._control.send(LEAVE + str(pid).encode())

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> int:
        """Ends the process, its workers and all they started; returns its exit status."""
        self._control.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and the kernel its workers
            return self._process.wait()


class WorkerProcess:
    """A `grpo_mega.rewards.workers.worker`.

    `check` is what it is at work on; `started_at` (time.monotonic) is when it began with that, or when the process was started;
    `is_ready` is set by the pool once the worker says so.
    """

    def __init__(self, template: Template, pid: int, input_fd: int, output_fd: int) -> None:
        self._template = template
        self.pid = pid
        self.input_fd = input_fd  # what to wait on while `has_unsent`
        self.output_fd = output_fd  # what to wait on for its replies
        os.set_blocking(input_fd, False)
        os.set_blocking(output_fd, False)
        self._unsent = bytearray()
        self._received = FrameBuffer()
        self.check: Any = None
        self.is_ready = False
        self.started_at = time.monotonic()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes = b"") -> None:
        """Writes what the pipe takes of the data so far; a dead worker shows when it is read from, not here."""
        self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: os.write(self.input_fd, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()

    def receive(self) -> list[tuple[Any, ...]] | None:
        """The messages that are there; None if the process has ended."""
        try:
            data = os.read(self.output_fd, _READ_SIZE)
        except BlockingIOError:
            return []
        return self._received.feed(data) if data else None

    def end(self) -> int:
        """Ends the process, if it has not ended, and all it started; returns its exit status (negative: the signal)."""
        self.close()
        return self._template.end(self.pid)

    def leave(self) -> None:
        """As `end`, without waiting for what takes long after a check that filled gigabytes."""
        self.close()
        self._template.leave(self.pid)

    def close(self) -> None:
        """Closes the pipes, in place of `end` where the template is killed with all its workers."""
        os.close(self.input_fd)
        os.close(self.output_fd)
