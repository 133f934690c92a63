"""Remove temporary folders and shared memory of servers that are gone.

SGLang ends its processes with SIGKILL even without an error, so it never cleans up. Each server has a folder of temporary.py.
While any of its processes lives, the folder is locked and the server's shared memory is open. An unlocked folder, or memory
that no process has open, belongs to a dead server, so `remove_unused` needs no record of servers.
"""

from __future__ import annotations

import contextlib
import glob
import os
from pathlib import Path

from grpo_mega import temporary

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_PREFIXES = ("sglang_loads_", "sgl_shm_")  # SGLang's load snapshots and message queues


def remove_unused() -> None:
    """Remove the temporary folders and the shared memory of servers that are gone."""
    temporary.remove_unused()
    segments = [path for path in SHARED_MEMORY.glob("*") if path.name.startswith(SHARED_MEMORY_PREFIXES)]
    in_use = _open_files() if segments else set()
    for segment in segments:
        if str(segment) not in in_use:
            with contextlib.suppress(OSError):
                segment.unlink()


def _open_files() -> set[str]:
    paths = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            paths.add(os.readlink(link))
    return paths
