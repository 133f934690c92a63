"""Private temporary folders: only for this user, short enough for Unix sockets, and never left behind by a dead process.

Batch systems set a TMPDIR that is too long for the path of a socket in it (at most 107 bytes). So a folder is made in the first
of TMPDIR, /tmp, /dev/shm and XDG_RUNTIME_DIR that can bind a socket. A folder is locked while one of its processes lives. Its
name has the host, so hosts that share a TMPDIR remove only their own folders. Neither reused process ids nor a container's
process ids can cause a wrong removal.

`enter` creates a folder for everything that a process and its libraries make: fork servers, torch's shared memory, W&B.
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

KEEP = "keep"  # a folder with this file outlives its process
SHARED = "GRPO_MEGA_TMPDIR"  # the user's TMPDIR, in a process that has entered a private folder
LONGEST_SOCKET = "torch-shm-dir-XXXXXX/manager.sock"  # longest socket path that libraries make below TMPDIR

_entered: tuple[int, Path] | None = None  # the process that entered (it may have been forked since) and its folder


def enter() -> Path:
    """Create a folder, set TMPDIR to it until this process ends, and return it. May be called again.

    Raise ConfigError if no folder can bind a socket.
    """
    global _entered
    if _entered is None or _entered[0] != os.getpid():
        remove_unused()
        folder, _ = make_folder()
        os.environ[SHARED] = str(shared_folder())
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        _entered = os.getpid(), folder
        # This runs after the fork server removes its own folder in this one (exit priority -100), and not in forks.
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-1000)
    return _entered[1]


def shared_folder() -> Path:
    """Return the user's temporary folder, for files that later runs use too."""
    try:
        current = tempfile.gettempdir()
    except FileNotFoundError:  # no folder is writable
        current = os.environ.get("TMPDIR") or "/tmp"
    return Path(os.environ[SHARED] if Path(current).name.startswith(_prefix()) and SHARED in os.environ else current)


def make_folder() -> tuple[Path, int]:
    """Return a new folder, and the file descriptor that locks it for this process and its forks.

    Raise ConfigError if no folder can bind a socket.
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
    """Yield a new folder. It is removed at the end unless it has a file called KEEP."""
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
    """Raise OSError unless a socket with the longest name can be made below `folder`."""
    path = folder / LONGEST_SOCKET.replace("/", "-")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(path))
    path.unlink()
