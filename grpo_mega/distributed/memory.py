"""The memory of this machine and of its processes, read from /proc and from the limits of control groups (v1 and v2).

A job may run in a container, or in a batch system's cgroup, with less memory than the machine has. Then the kernel
kills its ranks at the limit of the cgroup, although /proc/meminfo shows free memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
