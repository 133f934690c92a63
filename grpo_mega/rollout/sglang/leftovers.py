"""Remove temporary folders and shared memory of servers that are gone.

SGLang ends its processes with SIGKILL even when all is well, so it never cleans up. Each server has a temporary folder, locked
by its processes as long as one of them lives; its shared memory is open in them for as long. A folder that is not locked, or
memory that is not open, belongs to no living server, so `remove_unused` needs no record of servers.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from pathlib import Path

FOLDER_PREFIX = "grpo-mega-server-"
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_PREFIXES = ("sglang_loads_", "sgl_shm_")  # SGLang's load snapshots and message queues
LONGEST_BASE = 60  # characters: the path of a Unix socket, which lies two names deeper, has at most 107


def make_folder() -> tuple[Path, int]:
    """Return a new temporary folder and the file descriptor that locks it, for this process and those forked from it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=_base()))
        with contextlib.suppress(OSError):  # removed by another process before it was locked
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)


def remove_unused() -> None:
    """Remove the temporary folders and the shared memory of servers that are gone."""
    for folder in _base().glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or another user's
            lock = _lock(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    segments = [path for path in SHARED_MEMORY.glob("*") if path.name.startswith(SHARED_MEMORY_PREFIXES)]
    in_use = _open_files() if segments else set()
    for segment in segments:
        if str(segment) not in in_use:
            with contextlib.suppress(OSError):
                segment.unlink()


def _base() -> Path:
    base = tempfile.gettempdir()
    return Path(base if len(base) <= LONGEST_BASE else "/tmp")


def _lock(folder: Path) -> int:
    """Lock a folder. Raise OSError if a living process holds the lock, or the folder is gone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open_files() -> set[str]:
    paths = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            paths.add(os.readlink(link))
    return paths
