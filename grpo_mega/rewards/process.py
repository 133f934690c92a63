"""One worker process as the pool sees it: started, sent checks, read from without blocking, killed.

Used from one thread only. The process is the leader of a session of its own, so that killing it takes along whatever a
reward function started, and an interrupt from the terminal does not reach it.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo_mega.rewards.protocol import FrameBuffer, Setup, frame

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_READ_SIZE = 1 << 16


class WorkerProcess:
    """A `grpo_mega.rewards.worker`.

    `check` is what it is at work on, as (key, index of the function); `started_at` (time.monotonic) is when it began with
    that, or when the process was started; `is_ready` is set by the pool once the worker says so.
    """

    def __init__(self, setup: Setup) -> None:
        # Not the parent's whole sys.path: set before start-up, a directory of it could shadow the standard library.
        path = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "grpo_mega.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)
        os.set_blocking(self._out.fileno(), False)
        self._unsent = bytearray()
        self._received = FrameBuffer()
        self.check: tuple[Any, int] | None = None
        self.is_ready = False
        self.started_at = time.monotonic()
        self.send(frame(pickle.dumps(setup)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output_fd(self) -> int:
        """What to wait on for its replies."""
        return self._out.fileno()

    @property
    def input_fd(self) -> int:
        """What to wait on while `has_unsent`."""
        return self._in.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, data: bytes = b"") -> None:
        """Writes what the pipe takes of the data so far; a dead worker shows when it is read from, not here."""
        self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in.fileno(), self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()

    def receive(self) -> list[tuple[Any, ...]] | None:
        """The messages that are there; None if the process has ended."""
        try:
            data = os.read(self._out.fileno(), _READ_SIZE)
        except BlockingIOError:
            return []
        return self._received.feed(data) if data else None

    def kill(self) -> int:
        """Ends the process and all it started; returns its exit status (negative: the signal)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended by itself already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._in.close()
        self._out.close()
        return self._process.wait()
