"""The checkpoints of a run: written in the background, verified, and only then visible.

A save stages the state in memory (staging.py), and training waits only for that. A background thread of each rank hashes the
rank's files, copies them to RUN_DIR/checkpoints/.step-N.partial, and reads them back to compare (checkpoint_writer.py). When
all ranks are done and the step is logged, rank 0's thread renames the folder to step-N, points `latest` to it, and removes old
checkpoints. So a visible checkpoint is always complete. `verify` detects files that changed since they were written.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from grpo_mega.config import Config
from grpo_mega.distributed.recorder import recorder
from grpo_mega.errors import ResumeError
from grpo_mega.formats.checkpoint_files import Manifest, clean, partial_name, publish
from grpo_mega.observe.progress import progress
from grpo_mega.paths import CHECKPOINTS, LATEST, STATE
from grpo_mega.rollout.backlog import NO_BACKLOG, Backlog
from grpo_mega.run.checkpoint_writer import SECONDS_BETWEEN_LOOKS, Writer
from grpo_mega.run.staging import all_ranks, remove_unused, stage

if TYPE_CHECKING:
    from grpo_mega.megatron.policy import Policy

SECONDS_FOR_OTHERS = 20.0  # after an error, how long this rank waits for other ranks to finish their parts
_CHUNK = 16 << 20  # bytes


class Checkpoints:
    """Saves of one run. All ranks call every method together, except `close`. Calls of one rank do not overlap."""

    def __init__(self, config: Config, rank: int, store: dist.Store, warn: Callable[[str], None]) -> None:
        self.folder = config.run_dir / CHECKPOINTS
        self._keep, self._rank, self._warn = config.checkpoint.keep, rank, warn
        self._shows_progress = config.log.progress and rank == 0
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]  # for the writers, because a connection serves one thread at a time
        self._num_saves = 0
        self._writer: Writer | None = None  # writer of the save in progress
        self._last: Manifest | None = None  # manifest of the last save
        self._num_pushed = 0  # Policy.num_effective_steps at the last save
        self.saved_step: int | None = None  # step of the last checkpoint that was saved or resumed from
        remove_unused()
        if rank == 0:
            clean(self.folder)
        dist.barrier()

    def save(self, policy: Policy, manifest: Manifest, backlog: Backlog = NO_BACKLOG) -> None:
        """Stage the state and start to write it in the background. Raise ResumeError if it cannot or must not be written."""
        self.finish()
        if manifest.step == self.saved_step:  # no step has finished since the last save
            return
        self._check_weights_changed(policy, manifest)
        num_bytes = policy.state_bytes + (backlog.num_bytes if self._rank == 0 else 0)
        self._check_disk(num_bytes)
        target = self.folder / partial_name(manifest.step) / STATE
        target.mkdir(parents=True, exist_ok=True)

        def write(folder: Path) -> None:
            policy.save(folder)
            if self._rank == 0:
                backlog.write(folder)

        staged = stage(write, num_bytes, target)
        self._num_saves += 1
        self._last, self.saved_step = manifest, manifest.step
        self._writer = Writer(
            staged,
            target,
            store=self._store,
            key=f"checkpoint/{self._num_saves}",
            rank=self._rank,
            world_size=dist.get_world_size(),
            publish=lambda checksums: publish(self.folder, replace(manifest, checksums=checksums), self._keep),
        )

    def poll(self) -> None:
        """Allow a save to become visible after its step is logged. Do not wait. Raise ResumeError if it was not written."""
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
        failures = [""] * dist.get_world_size()
        dist.all_gather_object(failures, self._writer.failure)
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

    def _wait(self, writer: Writer, seconds_for_others: float | None = None) -> None:
        """Wait until the writer has ended, but at most `seconds_for_others` after it has written this rank's part.

        Written bytes count as progress of this rank for the hang watch.
        """
        shown = writer.num_done
        until: float | None = None
        with progress(writer.num_bytes - shown, "writing the checkpoint", self._shows_progress, "bytes") as bar:
            while writer.is_alive() and (until is None or time.monotonic() < until):
                writer.join(SECONDS_BETWEEN_LOOKS)
                if writer.num_done > shown:
                    recorder().beat()
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
                f"a checkpoint may need {int(needed) / 2**20:.0f} MiB, but {self.folder} has {free / 2**20:.0f} MiB free; "
                "free the disk and resume, or lower checkpoint.keep"
            )

    def _check_weights_changed(self, policy: Policy, manifest: Manifest) -> None:
        """Raise ResumeError if gradients did not change the weights since the last save. Warn if there were no gradients."""
        last, num_effective_steps = self._last, policy.num_effective_steps - self._num_pushed
        self._num_pushed = policy.num_effective_steps
        if last is None or manifest.optimizer_step == last.optimizer_step or manifest.fingerprint != last.fingerprint:
            return
        num_steps = manifest.optimizer_step - last.optimizer_step
        text = f"the weights did not change in {num_steps} optimizer steps since step {last.step}"
        if num_effective_steps:
            raise ResumeError(f"{text}; is optimizer.lr too small?")
        self._warn(f"{text}: past warm-up, no gradient was above 0; do rewards differ within any group?")


def verify(checkpoint: Path, manifest: Manifest, rank: int, world_size: int) -> None:
    """Compare every file with its checksum. Ranks share the work. Raise ResumeError with the file's name on all ranks."""
    names = sorted(manifest.checksums)
    wrong = [
        problem
        for name in names[rank::world_size]
        if (problem := _problem(checkpoint / STATE / name, manifest.checksums[name]))
    ]
    everyone: list[list[str]] = [[]] * world_size
    dist.all_gather_object(everyone, wrong)
    problems = [problem for one in everyone for problem in one]
    if problems:
        raise ResumeError(f"{problems[0]}; put the name of an older step-N into {checkpoint.parent / LATEST} and resume")


def _problem(path: Path, checksum: str) -> str | None:
    if not path.is_file():
        return f"checkpoint file {path} is missing"
    return None if sha256(path) == checksum else f"checkpoint file {path} has changed since it was written (checksum differs)"


def sha256(path: Path) -> str:
    """Return the sha256 of a file's content. Each chunk counts as progress for the hang watch."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            recorder().beat()
    return digest.hexdigest()
