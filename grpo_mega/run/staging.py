"""Stages a checkpoint in the memory of each node, so training does not wait for the disk.

One rank per node creates a private folder in a tmpfs, with an unpredictable name, and sends the name to the node's other ranks.
When the folder has the state, each rank opens its files and removes their names. After that the memory is freed when the
process ends, however it ends. A folder that no process has locked is left over from a killed run, and the next run of the same
user removes it. Folders of other users are never used, followed or removed.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from grpo_mega.processes import make_locked_folder, remove_unlocked

MEMORY = Path("/dev/shm")
PREFIX = "grpo_mega-staging-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class StagedFile:
    """A file of the state that this rank wrote. It is in memory, without a name, or already in its final folder."""

    name: str
    content: BinaryIO  # open for reading; closing it frees the memory
    num_bytes: int
    is_in_memory: bool


def stage(write: Callable[[Path], None], num_bytes: int, disk: Path) -> list[StagedFile]:
    """Write the state by `write(folder)`. This rank writes `num_bytes`. Return the files that this rank wrote.

    The files are in memory if each node has room for its part. They are in the folder `disk` if a node has no room, or if
    `disk` is in the same file system. All ranks call it together.
    """
    rank = dist.get_rank()
    nodes: list[tuple[tuple[str, int], int]] = [(("", 0), 0)] * dist.get_world_size()
    dist.all_gather_object(nodes, (_node(), num_bytes))
    sizes = {other: size for other, (node, size) in enumerate(nodes) if node == nodes[rank][0]}  # by rank, only this node
    leader = min(sizes)
    made, lock = _make_folder(sum(sizes.values()), disk) if rank == leader else (None, None)
    folders: list[Path | None] = [None] * dist.get_world_size()
    dist.all_gather_object(folders, made)
    memory = folders[leader]
    try:
        is_in_memory = all_ranks(memory is not None and is_private(memory))
        folder = memory if memory is not None and is_in_memory else disk
        write(folder)
        dist.barrier()
        # Every rank wrote its own shards, and rank 0 the common files.
        mine = [p for p in folder.iterdir() if p.name.startswith(f"__{rank}_") or (rank == 0 and not p.name.startswith("__"))]
        staged = [_take(path, is_in_memory=is_in_memory) for path in mine]
        dist.barrier()
    finally:
        if memory is not None:
            shutil.rmtree(memory, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    return staged


def all_ranks(value: bool) -> bool:
    """Return True if `value` is true on every rank. All ranks call it."""
    flag = torch.tensor([int(value)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def is_private(folder: Path) -> bool:
    """Return True if `folder` is a real folder of this user and closed to other users."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def remove_unused() -> None:
    """Remove this user's staging folders that no living process has locked."""
    remove_unlocked(PREFIX, MEMORY)


def _make_folder(num_bytes: int, disk: Path) -> tuple[Path, int] | tuple[None, None]:
    """Create a folder with room for `num_bytes`. Return it and the file descriptor that locks it.

    Return (None, None) if there is no room, or if `disk` is in the same file system, because files can be written to `disk`.
    """
    with suppress(OSError):  # there is no writable tmpfs
        if num_bytes < shutil.disk_usage(MEMORY).free / 2 and MEMORY.stat().st_dev != disk.stat().st_dev:
            return make_locked_folder(PREFIX, MEMORY)
    return None, None


def _take(path: Path, *, is_in_memory: bool) -> StagedFile:
    content = path.open("rb")
    if is_in_memory:
        path.unlink()
    return StagedFile(path.name, content, os.fstat(content.fileno()).st_size, is_in_memory)


def _node() -> tuple[str, int]:
    """Return an id of the tmpfs that this rank uses. Containers on one machine may have separate ones."""
    device = MEMORY.stat().st_dev if MEMORY.is_dir() else 0
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node(), device
