"""Find the processes below another process, and end them with it, in any state (Linux).

`die_with_parent` ends a process with its parent. Its own children end with a guardian: a process that adopts the orphans below
it (`adopt_orphans`) and calls `kill_descendants` before it exits. A temporary folder belongs to the processes that hold its
lock. `remove_unlocked` removes a folder when no process holds its lock, however they ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECONDS_TO_DIE = 60.0  # a process in a system call or with much GPU memory takes long

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    group: int


def living() -> Iterator[Process]:
    """Yield all processes of this machine except zombies. A process with living threads is none, even without its first."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if fields[0] not in ("Z", "X") or int(fields[17]) > 1:
                    yield Process(int(name), parent=int(fields[1]), group=int(fields[2]))


def descendants(pid: int) -> list[int]:
    """Return all living processes below `pid`."""
    children: dict[int, list[int]] = {}
    for process in living():
        children.setdefault(process.parent, []).append(process.pid)
    result: list[int] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        result += below
        pending += below
    return result


def kill_descendants() -> None:
    """Kill everything below this process and wait until it is gone. The process must have called `adopt_orphans`."""
    until = time.monotonic() + SECONDS_TO_DIE
    while time.monotonic() < until:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process. Raise OSError if the system does not support it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread of `parent` that started it ends. End now if it is gone.

    Children of this process do not inherit this. Raise OSError if the system does not support it and the parent lives.
    """
    try:
        _prctl(_PR_SET_PDEATHSIG, number)
    finally:
        if os.getppid() != parent:  # the parent ended before the kernel was asked
            os._exit(1)


def make_locked_folder(prefix: str, base: Path) -> tuple[Path, int]:
    """Return a new private folder, and the descriptor that locks it for this process and its forks.

    Raise OSError if no folder can be made, or its file system has no locks.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        try:
            lock = _lock(folder)
        except (FileNotFoundError, BlockingIOError):  # another process was faster and removed it as unlocked
            continue
        except OSError:
            folder.rmdir()
            raise
        if folder.exists():
            return folder, lock
        os.close(lock)


def remove_unlocked(prefix: str, base: Path, keep: str = "") -> None:
    """Remove this user's folders with this prefix that no living process has locked and that have no file called `keep`."""
    with contextlib.suppress(OSError):  # the base is gone, or closed
        for folder in list(base.glob(f"{prefix}*")):
            with contextlib.suppress(OSError):  # in use, a link, another user's, or already removed
                lock = _lock(folder)
                if os.fstat(lock).st_uid == os.geteuid() and not (keep and (folder / keep).exists()):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int:
    """Lock a folder. Raise OSError if a living process holds the lock, or it is not a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _prctl(option: int, value: int) -> None:
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None or prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) is refused")
