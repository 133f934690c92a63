"""A policy with a few bytes of state per rank. Reading its files is as slow as on a slow disk."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from grpo_mega.checkpoint_io.checkpoints import Manifest


class SlowPolicy:
    """The part of a policy that Checkpoints needs. Each rank's file is a pipe with `num_parts` parts of
    `part_bytes`.
    """

    def __init__(self, rank: int, num_parts: int = 3, part_bytes: int = 1000, pause_s: float = 0.0) -> None:
        self.num_effective_steps, self.state_bytes = 0, 1000
        self.folder: Path | None = None  # folder of the last saved state
        self.mode = 0
        self._rank, self._num_parts, self._part_bytes, self._pause_s = rank, num_parts, part_bytes, pause_s

    @property
    def content(self) -> bytes:
        return bytes([self._rank]) * (self._num_parts * self._part_bytes)

    def save(self, folder: Path) -> None:
        self.folder, self.mode = folder, folder.stat().st_mode & 0o777
        if self._rank == 0:
            (folder / "common.pt").write_bytes(b"common")
        if not self._pause_s:
            (folder / f"__{self._rank}_0.distcp").write_bytes(self.content)
            return
        pipe = folder / f"__{self._rank}_0.distcp"
        os.mkfifo(pipe)
        threading.Thread(target=self._feed, args=(pipe,), daemon=True).start()

    def _feed(self, pipe: Path) -> None:
        with pipe.open("wb", buffering=0) as stream:
            for _ in range(self._num_parts):
                stream.write(bytes([self._rank]) * self._part_bytes)
                time.sleep(self._pause_s)


def manifest(step: int) -> Manifest:
    return Manifest(
        step, step, fingerprint=str(step), layout="dp=3", model={}, seed=0, checksums={}, draws=step, inputs={}
    )
