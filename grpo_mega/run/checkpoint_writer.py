"""Writes one rank's part of a save in a background thread: write to disk, read back, publish when all ranks are done.

The writer threads of all ranks communicate through the job's store, without their main threads. Each thread posts the checksums
of its files. When rank 0's thread has all checksums, it renames the checkpoint to its final name. It first waits for
`may_publish`, until the metrics of the checkpoint's step are logged, because a resumed run never repeats that step.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from torch.distributed import Store

from grpo_mega.distributed.messages import seal_value, unseal_value
from grpo_mega.run.staging import StagedFile

SECONDS_BETWEEN_LOOKS = 0.2
_CHUNK = 16 << 20  # bytes
_CHUNKS_PER_SYNC = 16  # regular syncs keep the last fsync short and show progress


class Writer(threading.Thread):
    """A thread that starts at once. Only rank 0's thread calls `publish(checksums)`. No other thread may use `store`."""

    def __init__(
        self,
        staged: Sequence[StagedFile],
        target: Path,
        *,
        store: Store,
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
                written = self._digest(file.content, copy)
        else:
            os.fsync(file.content.fileno())
            written = self._digest(file.content)
        file.content.close()
        with path.open("rb") as copy_again:
            if self._digest(copy_again) != written:
                raise OSError(f"{path} reads back differently from what was written")
        return written

    def _digest(self, source: BinaryIO, copy: BinaryIO | None = None) -> str:
        """Return the sha256 of the content of `source`. Write the content to `copy`, if there is one, and sync it to disk."""
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
            self.num_done += len(chunk)
            if self.is_given_up.is_set():
                raise InterruptedError("the run ended before it was written")
        if copy is not None:
            copy.flush()
            os.fsync(copy.fileno())
        return digest.hexdigest()

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
