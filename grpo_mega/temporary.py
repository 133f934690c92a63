"""Private temporary folders: of this user alone, short enough for Unix sockets, and none left behind by a dead process.

Batch systems set a TMPDIR that is too long for the path of a socket below it, which has at most 107 bytes. A folder is
therefore made below the first of TMPDIR, /tmp, /dev/shm and XDG_RUNTIME_DIR in which a socket can be bound. A folder is locked
by its processes as long as one of them lives, and carries its host in its name: where several hosts share a TMPDIR, each
removes only its own. Neither a process id that is used again nor a container's own process ids can mislead that.

`enter` gives a process a folder for all that it and its libraries make: fork servers, torch's shared memory, W&B.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

from grpo_mega.errors import ConfigError
from grpo_mega.processes import make_locked_folder, remove_unlocked

KEEP = "keep"  # a file in a folder that is to outlive its process
SHARED = "GRPO_MEGA_TMPDIR"  # the user's TMPDIR, in a process that has entered a folder of its own
LONGEST_SOCKET = "torch-shm-dir-XXXXXX/manager.sock"  # of the sockets that libraries make below TMPDIR

_entered: tuple[int, Path] | None = None  # the process that entered, which may have been forked since, and its folder


def enter() -> Path:
    """Give this process a folder, which TMPDIR names from now on, until it ends; return the folder. May be called again.

    Raises ConfigError where no folder takes a socket.
    """
    global _entered
    if _entered is None or _entered[0] != os.getpid():
        remove_unused()
        folder, _ = make_folder()
        os.environ[SHARED] = str(shared_folder())
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        _entered = os.getpid(), folder
        # After the fork server, which removes its own folder in this one at the exit with priority -100. Not in forks.
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-1000)
    return _entered[1]


def shared_folder() -> Path:
    """Return the user's temporary folder: for what later runs use too."""
    try:
        current = tempfile.gettempdir()
    except FileNotFoundError:  # none can be written to
        current = os.environ.get("TMPDIR") or "/tmp"
    return Path(os.environ[SHARED] if Path(current).name.startswith(_prefix()) and SHARED in os.environ else current)


def make_folder() -> tuple[Path, int]:
    """Return a new folder, and the file descriptor that locks it for this process and those forked from it.

    Raises ConfigError where no folder takes a socket.
    """
    problems = []
    for base in _bases():
        try:
            folder, lock = make_locked_folder(_prefix(), base)
        except OSError as error:
            problems.append(f"{base}: {error.strerror}")
            continue
        try:
            _check_socket(folder)
            return folder, lock
        except OSError as error:
            problems.append(f"{base}: {error.strerror or error}")
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    longest = 107 - len(f"/{_prefix()}XXXXXXXX/{LONGEST_SOCKET}")
    raise ConfigError(
        f"TMPDIR={shared_folder()}: no folder takes a Unix socket ({'; '.join(problems)}); set TMPDIR to a writable folder of "
        f"at most {longest} characters"
    )


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a new folder, which is removed at the end unless it holds a file of the name KEEP."""
    folder, lock = make_folder()
    try:
        yield folder
    finally:
        if not (folder / KEEP).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_unused() -> None:
    """Remove the folders that this user's dead processes left on this host."""
    for base in _bases():
        remove_unlocked(_prefix(), base, keep=KEEP)


def _bases() -> list[Path]:
    names = [str(shared_folder()), "/tmp", "/dev/shm", os.environ.get("XDG_RUNTIME_DIR", "")]
    return [Path(name) for name in dict.fromkeys(names) if name]


def _prefix() -> str:
    return f"grpo-mega-{hashlib.blake2b(platform.node().encode(), digest_size=3).hexdigest()}-"


def _check_socket(folder: Path) -> None:
    """Raise OSError unless a socket with the longest name below `folder` can be made."""
    path = folder / LONGEST_SOCKET.replace("/", "-")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(path))
    path.unlink()
