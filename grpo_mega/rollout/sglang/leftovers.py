"""Remove what a server could leave on this machine: temporary folders and shared memory.

SGLang ends its processes with SIGKILL even when all is well, so nothing in it cleans up. Its files go to a folder of its own,
locked by the server's processes as long as one of them lives, and its shared memory is open in them as long. What is neither
locked nor open is garbage, whoever made it and however that ended: `remove_unused` needs no record of it.
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
    """A new temporary folder and the file descriptor that locks it, for this process and those forked from it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=_base()))
        with contextlib.suppress(OSError):  # taken for garbage before it was locked
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)


def remove_unused() -> None:
    """Removes the temporary folders and the shared memory of servers that are gone."""
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
    """Raises OSError if a living process holds the lock, or the folder is gone."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _open_files() -> set[str]:
    found = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(link))
    return found
