"""Memory of a node in which its ranks lay down a checkpoint, so that training does not wait for the disk.

One rank per node makes a private folder in a tmpfs, under a name that cannot be foreseen, and tells the node's other ranks.
Once the state is in it, each rank opens its own files and removes their names: from then on the memory is freed with the
process, however it ends. A folder that a killed run left is one that no process has locked; the next run of its user removes
it. Folders of other users are neither used nor followed nor removed.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

MEMORY = Path("/dev/shm")
PREFIX = "grpo_mega-staging-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class StagedFile:
    """A file of the state that this rank wrote: in memory, without a name, or already in its place on the disk."""

    name: str
    content: BinaryIO  # open for reading; closing it frees the memory
    num_bytes: int
    is_in_memory: bool


class Staging:
    """All ranks call `stage` together."""

    def __init__(self, rank: int) -> None:
        nodes: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(nodes, _node())
        self._rank = rank
        self._peers = [other for other, node in enumerate(nodes) if node == nodes[rank]]  # on this node, itself among them
        if self._is_leader:
            remove_unused()

    @property
    def _is_leader(self) -> bool:
        return self._rank == self._peers[0]

    def stage(self, write: Callable[[Path], None], num_bytes: int, disk: Path) -> list[StagedFile]:
        """Have `write(folder)` write the state, `num_bytes` of it by this rank, into memory if each node has room for its part,
        else into the folder `disk`. Returns the files that this rank wrote."""
        with self._folder(num_bytes) as folder:
            write(disk if folder is None else folder)
            dist.barrier()
            staged = [_take(path, is_in_memory=folder is not None) for path in self._mine(disk if folder is None else folder)]
            dist.barrier()
        return staged

    @contextmanager
    def _folder(self, num_bytes: int) -> Iterator[Path | None]:
        """The node's folder, while the context lasts; None if not every node has one with room enough."""
        sizes: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sizes, num_bytes)
        made, lock = _make_folder(sum(sizes[peer] for peer in self._peers)) if self._is_leader else (None, None)
        told: list[Path | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, made)
        folder = told[self._peers[0]]
        try:
            yield folder if _agree(folder is not None and is_private(folder)) else None
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    def _mine(self, folder: Path) -> list[Path]:
        """The files that this rank wrote: its own shards, and on rank 0 the common files."""
        own = [p for p in folder.iterdir() if p.name.startswith(f"__{self._rank}_")]
        return own + ([p for p in folder.iterdir() if not p.name.startswith("__")] if self._rank == 0 else [])


def is_private(folder: Path) -> bool:
    """A real folder of this user, closed to all others."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def remove_unused() -> None:
    """Remove this user's staging folders that no living process has locked."""
    for folder in MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, a link, or gone by now
            lock = _lock(folder)
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _make_folder(num_bytes: int) -> tuple[Path, int] | tuple[None, None]:
    """A new folder with room for `num_bytes`, and the file descriptor that locks it; None if there is no room."""
    with suppress(OSError):  # no tmpfs, or none to write into
        while num_bytes < shutil.disk_usage(MEMORY).free / 2:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY))
            with suppress(OSError):  # another run took it for unused before it was locked
                lock = _lock(folder)
                if folder.exists():
                    return folder, lock
                os.close(lock)
    return None, None


def _lock(folder: Path) -> int:
    """Raises OSError if a living process holds the lock, or it is no folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _take(path: Path, *, is_in_memory: bool) -> StagedFile:
    content = path.open("rb")
    if is_in_memory:
        path.unlink()
    return StagedFile(path.name, content, os.fstat(content.fileno()).st_size, is_in_memory)


def _node() -> tuple[str, int]:
    """The same for the ranks that share the tmpfs, and for no others: containers on one machine may have one each."""
    device = MEMORY.stat().st_dev if MEMORY.is_dir() else 0
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node(), device


def _agree(value: bool) -> bool:
    flag = torch.tensor([int(value)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)
