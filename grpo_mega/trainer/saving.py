"""Saves of a run's checkpoints: staged in memory, written in the background, verified, and only then visible.

Training waits only until the state is in a private folder in the tmpfs of each node. Each rank opens its files and
removes their names, so the memory is freed when the process ends, however it ends. A background thread of each rank
then hashes its files, copies them to RUN_DIR/checkpoints/.step-N.partial, and reads them back. The threads of all ranks
communicate through the job's store. When all ranks are done, and the step is logged because a resumed run never repeats
it, rank 0's thread publishes the checkpoint (checkpoint_io/checkpoints.py). So a visible checkpoint is always complete.

A staging folder that no process has locked is left over from a killed run, and the next run of the same user removes
it. Folders of other users are never used, followed or removed. `verify` detects files that changed since they were
written.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import torch
import torch.distributed as dist

from grpo_mega.checkpoint_io.checkpoints import Manifest, clean, partial_name, publish
from grpo_mega.distributed.messages import seal_value, unseal_value
from grpo_mega.distributed.watchdog import recorder
from grpo_mega.errors import ResumeError
from grpo_mega.paths import CHECKPOINTS, LATEST, STATE
from grpo_mega.processes import make_locked_folder, remove_unlocked
from grpo_mega.tracking.progress import progress

if TYPE_CHECKING:
    from grpo_mega.megatron.policy import Policy

T = TypeVar("T")
MEMORY = Path("/dev/shm")
PREFIX = "grpo_mega-staging-"
SECONDS_FOR_OTHERS = 20.0  # after an error, how long this rank waits for other ranks to finish their parts
SECONDS_BETWEEN_LOOKS = 0.2
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CHUNK = 16 << 20  # bytes
_CHUNKS_PER_SYNC = 16  # regular syncs keep the last fsync short and show progress


class Checkpoints:
    """Saves of one run. All ranks call every method together, except `close`. Calls of one rank do not overlap."""

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        rank: int,
        store: dist.Store,
        warn: Callable[[str], None],
        shows_progress: bool = False,
    ) -> None:
        self.folder = run_dir / CHECKPOINTS
        self._keep, self._rank, self._warn = keep, rank, warn
        self._shows_progress = shows_progress
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # for the writers, because a connection serves one thread at a time
        self._num_saves = 0
        self._writer: _Writer | None = None  # writer of the save in progress
        self._last: Manifest | None = None  # manifest of the last save
        self._num_pushed = 0  # Policy.num_effective_steps at the last save
        self.saved_step: int | None = None  # step of the last checkpoint that was saved or resumed from
        remove_unlocked(PREFIX, MEMORY)
        if rank == 0:
            clean(self.folder)
        dist.barrier()

    def save(self, policy: Policy, manifest: Manifest, files: Mapping[str, bytes] = NO_FILES) -> None:
        """Stage the state and start to write it in the background. Raise ResumeError if it cannot or must not be
        written.

        `files` are rank 0's further files of the state, by name.
        """
        self.finish()
        if manifest.step == self.saved_step:  # no step has finished since the last save
            return
        self._check_weights_changed(policy, manifest)
        num_bytes = policy.state_bytes + sum(map(len, files.values()))
        self._check_disk(num_bytes)
        target = self.folder / partial_name(manifest.step) / STATE
        target.mkdir(parents=True, exist_ok=True)

        def write(folder: Path) -> None:
            policy.save(folder)
            for name, content in files.items():
                (folder / name).write_bytes(content)

        staged = stage(write, num_bytes, target)
        self._num_saves += 1
        self._last, self.saved_step = manifest, manifest.step
        self._writer = _Writer(
            staged,
            target,
            store=self._store,
            key=f"checkpoint/{self._num_saves}",
            rank=self._rank,
            world_size=dist.get_world_size(),
            publish=lambda checksums: publish(self.folder, replace(manifest, checksums=checksums), self._keep),
        )

    def poll(self) -> None:
        """Allow a save to become visible after its step is logged. Do not wait. Raise ResumeError if it was not
        written.
        """
        if self._writer is not None:
            self._writer.may_publish.set()
            if all_ranks(not self._writer.is_alive()):
                self.finish()

    def finish(self) -> None:
        """Wait until a save in progress is visible. Raise ResumeError if a rank could not write its part."""
        if self._writer is None:
            return
        self._writer.may_publish.set()
        self._wait(self._writer)
        failures = gather(self._writer.failure)
        self._writer = None
        for failure in filter(None, failures):
            step, self._last, self.saved_step = self.saved_step, None, None
            raise ResumeError(f"checkpoint of step {step} was not written ({failure}); free the disk and resume")

    def close(self) -> None:
        """End a save in progress after an error, without other ranks. If its step is logged, wait for it a while."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if writer.may_publish.is_set():
            self._wait(writer, SECONDS_FOR_OTHERS)
        writer.is_given_up.set()
        writer.join(SECONDS_FOR_OTHERS)

    def _wait(self, writer: _Writer, seconds_for_others: float | None = None) -> None:
        """Wait until the writer has ended, but at most `seconds_for_others` after it has written this rank's part.

        Written bytes count as progress of this rank for the hang watch.
        """
        shown = writer.num_done
        until: float | None = None
        with progress(writer.num_bytes - shown, "writing the checkpoint", self._shows_progress, "bytes") as bar:
            while writer.is_alive() and (until is None or time.monotonic() < until):
                writer.join(SECONDS_BETWEEN_LOOKS)
                if writer.num_done > shown:
                    recorder().heartbeat()
                    bar.advance(writer.num_done - shown)
                    shown = writer.num_done
                if until is None and seconds_for_others is not None and writer.is_written.is_set():
                    until = time.monotonic() + seconds_for_others

    def _check_disk(self, num_bytes: int) -> None:
        """Raise ResumeError if the disk has no room for the state of all ranks. This rank's part has `num_bytes`."""
        needed = torch.tensor([num_bytes])
        dist.all_reduce(needed)
        free = shutil.disk_usage(self.folder).free
        if int(needed) > free:
            raise ResumeError(
                f"a checkpoint may need {int(needed) / 2**20:.0f} MiB, but {self.folder} has {free / 2**20:.0f} MiB"
                " free; free the disk and resume, or lower checkpoint.keep"
            )

    def _check_weights_changed(self, policy: Policy, manifest: Manifest) -> None:
        """Raise ResumeError if gradients did not change the weights since the last save. Warn if there were no
        gradients.
        """
        last, num_effective_steps = self._last, policy.num_effective_steps - self._num_pushed
        self._num_pushed = policy.num_effective_steps
        if last is None or manifest.optimizer_step == last.optimizer_step or manifest.fingerprint != last.fingerprint:
            return
        num_steps = manifest.optimizer_step - last.optimizer_step
        text = f"the weights did not change in {num_steps} optimizer steps since step {last.step}"
        if num_effective_steps:
            raise ResumeError(f"{text}; is optimizer.lr too small?")
        self._warn(f"{text}: past warm-up, no gradient was above 0; do rewards differ within any group?")


@dataclass(frozen=True)
class StagedFile:
    """A file of the state that this rank wrote. It is in memory, without a name, or already in its final folder."""

    name: str
    content: BinaryIO  # open for reading; closing it frees the memory
    num_bytes: int
    is_in_memory: bool


def stage(write: Callable[[Path], None], num_bytes: int, disk: Path) -> list[StagedFile]:
    """Write the state by `write(folder)`. This rank writes `num_bytes`. Return the files that this rank wrote.

    The files are in memory if each node has room for its part. They are in the folder `disk` if a node has no room, or
    if `disk` is in the same file system. All ranks call it together.
    """
    rank = dist.get_rank()
    # An id of the tmpfs that this rank uses. Containers on one machine may have separate ones.
    machine = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else platform.node()
    tmpfs = machine, MEMORY.stat().st_dev if MEMORY.is_dir() else 0
    # By rank, only this node.
    sizes = {other: size for other, (node, size) in enumerate(gather((tmpfs, num_bytes))) if node == tmpfs}
    leader = min(sizes)
    made, lock = None, None
    with suppress(OSError):  # there is no writable tmpfs
        has_room = rank == leader and sum(sizes.values()) < shutil.disk_usage(MEMORY).free / 2
        if has_room and MEMORY.stat().st_dev != disk.stat().st_dev:
            made, lock = make_locked_folder(PREFIX, MEMORY)
    memory = gather(made)[leader]
    try:
        is_in_memory = all_ranks(memory is not None and is_private(memory))
        folder = memory if memory is not None and is_in_memory else disk
        write(folder)
        dist.barrier()
        # Every rank wrote its own shards, and rank 0 the common files.
        mine = [
            p
            for p in folder.iterdir()
            if p.name.startswith(f"__{rank}_") or (rank == 0 and not p.name.startswith("__"))
        ]
        staged = []
        for path in mine:
            staged.append(StagedFile(path.name, path.open("rb"), path.stat().st_size, is_in_memory))
            if is_in_memory:
                path.unlink()
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


def gather(value: T, ranks: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all `ranks`. None: the default group. All of them call it."""
    values = [value] * dist.get_world_size(ranks)
    dist.all_gather_object(values, value, group=ranks)
    return values


def is_private(folder: Path) -> bool:
    """Return True if `folder` is a real folder of this user and closed to other users."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


class _Writer(threading.Thread):
    """A thread that starts at once. Only rank 0's thread calls `publish(checksums)`. No other thread may use
    `store`.
    """

    def __init__(
        self,
        staged: Sequence[StagedFile],
        target: Path,
        *,
        store: dist.Store,
        key: str,
        rank: int,
        world_size: int,
        publish: Callable[[dict[str, str]], None],
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._staged, self._folder, self._publish = staged, target, publish
        self._store, self._rank = store, rank
        self._keys = [f"{key}/{other}" for other in range(world_size)]
        self.num_bytes = sum(file.num_bytes * 2 for file in staged)  # each file is written and read back
        self.num_done = 0
        self.failure = ""  # the reason why the save failed, as far as this rank knows
        self.is_written = threading.Event()  # set when this rank's part is on the disk
        self.may_publish = threading.Event()
        self.is_given_up = threading.Event()  # when set, the thread ends soon without publishing
        self.start()

    def run(self) -> None:
        checksums: dict[str, str] = {}
        try:
            for file in self._staged:
                checksums[file.name] = self._write(file)
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}" if not isinstance(error, OSError) else str(error)
        finally:
            for file in self._staged:
                file.content.close()
        self.is_written.set()
        try:
            key = self._keys[self._rank]
            self._store.set(key, seal_value(key, [checksums, self.failure]))
            if self._rank == 0:
                self._publish_once_all_are_done()
        except BaseException as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def _write(self, file: StagedFile) -> str:
        """Write a file, verify it on the disk, and return its sha256."""
        path = self._folder / file.name
        if file.is_in_memory:
            with path.open("wb") as copy:
                written = _digest(file.content, self._count, copy)
        else:
            os.fsync(file.content.fileno())
            written = _digest(file.content, self._count)
        file.content.close()
        with path.open("rb") as copy_again:
            if _digest(copy_again, self._count) != written:
                raise OSError(f"{path} reads back differently from what was written")
        return written

    def _count(self, num_bytes: int) -> None:
        self.num_done += num_bytes
        if self.is_given_up.is_set():
            raise InterruptedError("the run ended before it was written")

    def _publish_once_all_are_done(self) -> None:
        checksums: dict[str, str] = {}
        for key in self._keys:
            while not self._store.check([key]):
                if self.is_given_up.wait(SECONDS_BETWEEN_LOOKS):
                    return
            sums, failure = unseal_value(key, self._store.get(key))
            checksums |= sums
            self.failure = self.failure or failure
            self._store.delete_key(key)
        if self.failure:
            shutil.rmtree(self._folder.parent, ignore_errors=True)
            return
        while not self.may_publish.wait(SECONDS_BETWEEN_LOOKS):
            if self.is_given_up.is_set():
                return
        self._publish(dict(sorted(checksums.items())))


def verify_files(checkpoint: Path, manifest: Manifest, rank: int, world_size: int) -> None:
    """Compare every file with its checksum. Ranks share the work. Raise ResumeError with the file's name on all
    ranks.
    """
    wrong = []
    for name, checksum in sorted(manifest.checksums.items())[rank::world_size]:
        path = checkpoint / STATE / name
        if not path.is_file():
            wrong.append(f"checkpoint file {path} is missing")
            continue
        with path.open("rb") as file:
            if _digest(file, lambda _: recorder().heartbeat()) != checksum:
                wrong.append(f"checkpoint file {path} has changed since it was written (checksum differs)")
    for problem in chain.from_iterable(gather(wrong)):
        raise ResumeError(f"{problem}; put the name of an older step-N into {checkpoint.parent / LATEST} and resume")


def _digest(source: BinaryIO, on_chunk: Callable[[int], None], copy: BinaryIO | None = None) -> str:
    """Return the sha256 of the content of `source`. Write the content to `copy`, if there is one, and sync it to disk.

    Call `on_chunk` with the length of each chunk.
    """
    digest = hashlib.sha256()
    number = 0
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        number += 1
        if copy is not None:
            copy.write(chunk)
            if number % _CHUNKS_PER_SYNC == 0:
                copy.flush()
                os.fdatasync(copy.fileno())
        on_chunk(len(chunk))
    if copy is not None:
        copy.flush()
        os.fsync(copy.fileno())
    return digest.hexdigest()
