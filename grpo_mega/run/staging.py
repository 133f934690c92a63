"""Stages a checkpoint in the memory of each node, so that training does not wait for the disk.

One rank per node makes a private folder in a tmpfs, under an unpredictable name, and sends the name to the node's other ranks.
Once the state is in it, each rank opens its own files and removes their names: from then on the memory is freed with the
process, however it ends. A folder that no process has locked was left by a killed run; the next run of the same user
removes it. Folders of other users are neither used nor followed nor removed.
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
    """A file of the state that this rank wrote: in memory, without a name, or already in its final folder."""

    name: str
    content: BinaryIO  # open for reading; closing it frees the memory
    num_bytes: int
    is_in_memory: bool


class Staging:
    """Stages the saves of one rank. All ranks call `stage` together."""

    def __init__(self, rank: int) -> None:
        nodes: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(nodes, _node())
        self._rank = rank
        self._peers = [other for other, node in enumerate(nodes) if node == nodes[rank]]  # all ranks of this node
        if self._is_leader:
            remove_unused()

    @property
    def _is_leader(self) -> bool:
        return self._rank == self._peers[0]

    def stage(self, write: Callable[[Path], None], num_bytes: int, disk: Path) -> list[StagedFile]:
        """Have `write(folder)` write the state, `num_bytes` of it by this rank, into memory if each node has room for its part,
        else into the folder `disk`. Return the files that this rank wrote."""
        with self._folder(num_bytes) as folder:
            write(disk if folder is None else folder)
            dist.barrier()
            staged = [_take(path, is_in_memory=folder is not None) for path in self._mine(disk if folder is None else folder)]
            dist.barrier()
        return staged

    @contextmanager
    def _folder(self, num_bytes: int) -> Iterator[Path | None]:
        """Make the node's folder, for as long as the context lasts; None unless every node has one with enough room."""
        sizes: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sizes, num_bytes)
        made, lock = _make_folder(sum(sizes[peer] for peer in self._peers)) if self._is_leader else (None, None)
        folders: list[Path | None] = [None] * dist.get_world_size()
        dist.all_gather_object(folders, made)
        folder = folders[self._peers[0]]
        try:
            yield folder if all_ranks(folder is not None and is_private(folder)) else None
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            if lock is not None:
                os.close(lock)

    def _mine(self, folder: Path) -> list[Path]:
        """Return the files that this rank wrote: its own shards, and on rank 0 the common files."""
        own = [p for p in folder.iterdir() if p.name.startswith(f"__{self._rank}_")]
        return own + ([p for p in folder.iterdir() if not p.name.startswith("__")] if self._rank == 0 else [])


def all_ranks(value: bool) -> bool:
    """Return True if `value` is true on every rank. All ranks call it."""
    flag = torch.tensor([int(value)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def is_private(folder: Path) -> bool:
    """Return True for a real folder of this user, closed to all others."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def remove_unused() -> None:
    """Remove this user's staging folders that no living process has locked."""
    for folder in MEMORY.glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, a link, or removed meanwhile
            lock = _lock(folder)
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _make_folder(num_bytes: int) -> tuple[Path, int] | tuple[None, None]:
    """Make a folder with room for `num_bytes`; return it and the file descriptor that locks it, or None if there is no room."""
    with suppress(OSError):  # no tmpfs, or not a writable one
        while num_bytes < shutil.disk_usage(MEMORY).free / 2:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY))
            with suppress(OSError):  # another run removed it as unused before it was locked
                lock = _lock(folder)
                if folder.exists():
                    return folder, lock
                os.close(lock)
    return None, None


def _lock(folder: Path) -> int:
    """Lock the folder. Raises OSError if a living process holds the lock, or it is not a folder."""
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
    """Return an id shared by exactly the ranks that share the tmpfs: containers on one machine may have one each."""
    device = MEMORY.stat().st_dev if MEMORY.is_dir() else 0
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node(), device
