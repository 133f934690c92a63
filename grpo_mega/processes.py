"""Nothing outlives a process: end the processes below it, and remove its temporary folders, however it ends (Linux).

`die_with_parent` ends a process with its parent. Its own children end with a guardian: a process that adopts the
orphans below it (`adopt_orphans`) and calls `kill_descendants` before it exits.

A temporary folder belongs to the processes that hold its lock. `remove_unlocked` removes a folder when no process holds
its lock. Private folders are only for this user, and short enough for Unix sockets. Batch systems set a TMPDIR that is
too long for the path of a socket in it (at most 107 bytes). So a folder is made in the first of TMPDIR, /tmp, /dev/shm
and XDG_RUNTIME_DIR that can bind a socket. Its name has the host, so hosts that share a TMPDIR remove only their own
folders. Neither reused process ids nor a container's process ids can cause a wrong removal.

The memory of this machine and of its processes is read from /proc and from the limits of control groups (v1 and v2). A
job may run in a container, or in a batch system's cgroup, with less memory than the machine has. Then the kernel kills
its ranks at the limit of the cgroup, although /proc/meminfo shows free memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path

from grpo_mega.errors import ConfigError

KEEP = "keep"  # a private folder with this file outlives its process
SHARED = "GRPO_MEGA_TMPDIR"  # the user's TMPDIR, in a process that has entered a private folder
LONGEST_SOCKET = "torch-shm-dir-XXXXXX/manager.sock"  # longest socket path that libraries make below TMPDIR
SECONDS_TO_DIE = 60.0  # a process in a system call or with much GPU memory takes long

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_entered: tuple[int, Path] | None = None  # the process that entered (it may have been forked since) and its folder
_own: set[tuple[int, Path]] = set()  # processes with the folders that they remove when they end


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    group: int


def living() -> Iterator[Process]:
    """Yield all processes of this machine except zombies. A process with living threads is none, even without its
    first.
    """
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


def kill_session(pid: int, *, has_ended: bool) -> None:
    """Kill a process that leads a session, and everything that it started, without waiting."""
    if not has_ended:
        _kill(pid, signal.SIGSTOP)  # stop it first, so it starts no more processes
        for each in (*descendants(pid), pid):
            _kill(each, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # processes that it left behind in its group
        os.killpg(pid, signal.SIGKILL)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_descendants() -> None:
    """Kill everything below this process and wait until it is gone. The process must have called `adopt_orphans`."""
    until = time.monotonic() + SECONDS_TO_DIE
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:  # nothing is below it
            return
        for pid in descendants(os.getpid()):
            _kill(pid, signal.SIGKILL)
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


def enter_private_folder() -> Path:
    """Create a folder, set TMPDIR to it until this process ends, and return it. May be called again.

    It is for everything that a process and its libraries make: fork servers, torch's shared memory, W&B. Raise
    ConfigError if no folder can bind a socket.
    """
    global _entered
    if _entered is None or _entered[0] != os.getpid():
        remove_unused_folders()
        folder, _ = make_folder()
        os.environ[SHARED] = str(shared_folder())
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        _entered = os.getpid(), folder
        own_folder(folder)
        # This runs after the fork server removes its own folder in this one (exit priority -100), and not in forks.
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-1000)
    return _entered[1]


def own_folder(folder: Path) -> None:
    """Let `remove_own_folders` remove a folder."""
    _own.add((os.getpid(), folder))


def remove_own_folders() -> None:
    """Remove the temporary folders of this process. Call it before an exit that skips the ends of contexts."""
    for pid, folder in list(_own):
        if pid == os.getpid() and not (folder / KEEP).exists():
            shutil.rmtree(folder, ignore_errors=True)


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
        f"TMPDIR={shared_folder()}: no folder takes a Unix socket ({'; '.join(problems)}); set TMPDIR to a writable"
        f" folder of at most {longest} characters"
    )


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a new folder. It is removed at the end unless it has a file called KEEP."""
    folder, lock = make_folder()
    own_folder(folder)
    try:
        yield folder
    finally:
        if not (folder / KEEP).exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_unused_folders() -> None:
    """Remove the folders that this user's dead processes left on this host."""
    for base in _bases():
        remove_unlocked(_prefix(), base, keep=KEEP)


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
    """Remove this user's folders with this prefix that no living process has locked and that have no file called
    `keep`.
    """
    with contextlib.suppress(OSError):  # the base is gone, or closed
        for folder in list(base.glob(f"{prefix}*")):
            with contextlib.suppress(OSError):  # in use, a link, another user's, or already removed
                lock = _lock(folder)
                if os.fstat(lock).st_uid == os.geteuid() and not (keep and (folder / keep).exists()):
                    shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


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


GIB = 2**30
NO_LIMIT = 1 << 60  # cgroup v1 reports a number near 2^63 if there is no limit


@dataclass(frozen=True)
class HostRoom:
    """Bytes that processes of this job may use. The pages of files that the kernel can drop count as available."""

    total: int
    available: int
    limit: str = "this machine"  # what sets `total`


def host_room(root: Path = Path("/")) -> HostRoom:
    """Return the smallest limit that applies to this process: of the machine, or of one of its control groups.

    A system without /proc has no limit.
    """
    if not (root / "proc/meminfo").is_file():
        return HostRoom(NO_LIMIT, NO_LIMIT)
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line)
    kib = {name: int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")}
    total, available = (kib["MemTotal"] + kib["SwapTotal"]) << 10, (kib["MemAvailable"] + kib["SwapFree"]) << 10
    limit = "this machine"
    for group, most, used in _limits(root):
        available = min(available, most - used)
        if most < total:
            total, limit = most, f"the cgroup {group}"
    return HostRoom(total, max(0, available), limit)


def num_killed_for_memory(root: Path = Path("/")) -> int:
    """Return the number of processes that the kernel has killed because memory ran out; 0 if it does not count them."""
    with suppress(OSError, KeyError, ValueError):
        return int(dict(line.split() for line in (root / "proc/vmstat").read_text().splitlines())["oom_kill"])
    return 0


def resident_bytes(pid: int) -> int | None:
    """Return the memory that a process holds (RSS); None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") or None  # a zombie has 0


def _limits(root: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the path, the limit and the use of each control group of this process, and of the groups above it.

    In a container /proc/self/cgroup may list paths of the host. Then only the top folder exists here.
    """
    lines = []
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            names = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            bases = [root / "sys/fs/cgroup/memory"]
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        for base in bases:
            folder = base / path.strip("/")
            for group in (folder, *folder.parents[: len(folder.parts) - len(base.parts)]):
                with suppress(OSError, ValueError):  # no such group, or "max"
                    most, used = (int((group / name).read_text()) for name in names[:2])
                    if most >= NO_LIMIT:
                        continue
                    droppable = 0  # bytes of files that the kernel drops before it kills a process of the group
                    with suppress(OSError):
                        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                        droppable = int(stat.get(names[2], 0))
                    yield f"/{group.relative_to(base).as_posix().strip('.')}", most, used - droppable
