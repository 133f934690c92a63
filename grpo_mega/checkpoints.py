"""The checkpoints of a run: written beside the training, proven, and only then visible.

A save stages the state in memory (a tmpfs), which is all that training waits for. A background thread
of each rank then hashes what the rank staged, copies it to RUN_DIR/checkpoints/.step-N.partial, and reads it back to compare.
When all ranks have done so, rank 0 renames the folder to step-N and moves `latest`; older ones go. A checkpoint that can be
seen is therefore whole; `verify` names the file that is not as it was written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mega.checkpoint_files import LATEST, STATE, Manifest, clean, partial_name, publish
from grpo_mega.config import CheckpointConfig
from grpo_mega.errors import ResumeError
from grpo_mega.megatron.policy import Policy
from grpo_mega.observe.byte_bar import byte_bar

STAGING = Path("/dev/shm")  # memory that is a file system; where it is too small, the disk is used
_CHUNK = 16 << 20  # bytes
_SECONDS_BETWEEN_LOOKS = 0.2


class Checkpoints:
    """Saves of one run. All ranks call every method together; the same rank's calls do not overlap."""

    def __init__(self, folder: Path, config: CheckpointConfig, rank: int, *, shows_progress: bool = False) -> None:
        self.folder, self._config, self._rank = folder, config, rank
        self._shows_progress = shows_progress and rank == 0
        self._num_staged = self._num_written = 0  # bytes of the save under way, by this rank
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._checksums: dict[str, str] = {}
        self._pending: Manifest | None = None
        self._last: Manifest | None = None
        self.saved_step: int | None = None  # whose checkpoint is there: the last one saved, or resumed from
        # The same for all ranks and starts of a run, so that what a killed one left is found and removed.
        self._staging_name = f".grpo_mega-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"
        self._remove_staging()
        if rank == 0:
            clean(folder)
        dist.barrier()

    def save(self, policy: Policy, manifest: Manifest) -> None:
        """Stages the state; the rest happens behind. Raises ResumeError if it cannot be, or must not be, written."""
        self.finish()
        if manifest.step == self.saved_step:  # an engine failed before another step was done
            return
        self._check_moved(manifest)
        staging = self._stage(policy)
        self._pending, self._checksums, self._failure = manifest, {}, None
        partial = self._partial(manifest.step)
        (partial / STATE).mkdir(parents=True, exist_ok=True)
        arguments = (self._mine(staging), partial / STATE)
        self._num_staged, self._num_written = sum(path.stat().st_size for path in arguments[0]), 0
        self._writer = threading.Thread(target=self._write, args=arguments, name="checkpoint", daemon=True)
        self._writer.start()

    def poll(self) -> None:
        """Makes a save visible if every rank has written its part; does not wait."""
        if self._pending is not None and self._agree(self._writer is not None and not self._writer.is_alive()):
            self.finish()

    def finish(self) -> None:
        """Waits for a save under way and makes it visible. Raises ResumeError if a rank could not write its part."""
        if self._pending is None or self._writer is None:
            return
        self._wait()
        manifest, self._pending = self._pending, None
        reports: list[tuple[dict[str, str], str]] = [({}, "")] * dist.get_world_size()
        dist.all_gather_object(reports, (self._checksums, str(self._failure or "")))
        self._remove_staging()
        failures = [text for _, text in reports if text]
        if failures:
            if self._rank == 0:
                shutil.rmtree(self._partial(manifest.step), ignore_errors=True)
            raise ResumeError(f"checkpoint of step {manifest.step} was not written ({failures[0]}); free the disk and resume")
        if self._rank == 0:
            checksums = {name: s for sums, _ in reports for name, s in sums.items()}
            publish(self.folder, replace(manifest, checksums=dict(sorted(checksums.items()))), self._config.keep)
        self._last, self.saved_step = manifest, manifest.step
        dist.barrier()

    def _wait(self) -> None:
        """Until this rank has written its part."""
        assert self._writer is not None
        shown = self._num_written
        with byte_bar(self._num_staged - shown, "writing the checkpoint", self._shows_progress) as bar:
            while self._writer.is_alive():
                self._writer.join(_SECONDS_BETWEEN_LOOKS)
                bar.advance(self._num_written - shown)
                shown = self._num_written

    def _stage(self, policy: Policy) -> Path:
        """The state in a folder of this node, once it is sure that the disk will take it."""
        needed = torch.tensor([policy.state_bytes])
        dist.all_reduce(needed)
        free = shutil.disk_usage(self.folder).free
        if int(needed) > free:
            raise ResumeError(
                f"a checkpoint may need {int(needed) / 2**20:.0f} MiB, but {self.folder} has {free / 2**20:.0f} MiB free; "
                "free the disk and resume, or lower checkpoint.keep"
            )
        has_room = STAGING.is_dir() and int(needed) < shutil.disk_usage(STAGING).free / 2
        staging = (STAGING if self._agree(has_room) else self.folder) / self._staging_name
        staging.mkdir(exist_ok=True)
        dist.barrier()
        policy.save(staging)
        dist.barrier()
        return staging

    def _remove_staging(self) -> None:
        for place in (STAGING, self.folder):
            shutil.rmtree(place / self._staging_name, ignore_errors=True)

    def _mine(self, staging: Path) -> list[Path]:
        """The files that this rank wrote: its own shards, and on rank 0 the common files."""
        own = [p for p in staging.iterdir() if p.name.startswith(f"__{self._rank}_")]
        return own + ([p for p in staging.iterdir() if not p.name.startswith("__")] if self._rank == 0 else [])

    def _write(self, staged: list[Path], target: Path) -> None:
        try:
            for path in staged:
                written = _copy(path, target / path.name)
                self._num_written += path.stat().st_size
                if sha256(target / path.name) != written:
                    raise OSError(f"{target / path.name} reads back otherwise than it was written")
                self._checksums[path.name] = written
                path.unlink()
        except BaseException as error:
            self._failure = error

    def _check_moved(self, manifest: Manifest) -> None:
        last = self._last
        if last and manifest.optimizer_step > last.optimizer_step and manifest.fingerprint == last.fingerprint:
            raise ResumeError(
                f"the weights are those of step {last.step} though {manifest.optimizer_step - last.optimizer_step} optimizer "
                "steps were taken since; nothing trains: is optimizer.lr too small?"
            )

    def _agree(self, value: bool) -> bool:
        flag = torch.tensor([int(value)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def _partial(self, step: int) -> Path:
        return self.folder / partial_name(step)


def verify(checkpoint: Path, manifest: Manifest, rank: int, world_size: int) -> None:
    """Compares every file with its checksum, ranks sharing the work. Raises ResumeError on all ranks, naming the file."""
    names = sorted(manifest.checksums)
    wrong = [
        problem
        for name in names[rank::world_size]
        if (problem := _problem(checkpoint / STATE / name, manifest.checksums[name]))
    ]
    everyone: list[list[str]] = [[]] * world_size
    dist.all_gather_object(everyone, wrong)
    found = [problem for one in everyone for problem in one]
    if found:
        raise ResumeError(f"{found[0]}; put the name of an older step-N into {checkpoint.parent / LATEST} and resume")


def _problem(path: Path, checksum: str) -> str | None:
    if not path.is_file():
        return f"checkpoint file {path} is missing"
    return None if sha256(path) == checksum else f"checkpoint file {path} is not as it was written (checksum differs)"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path) -> str:
    """Copies a file to the disk itself; returns the sha256 of what was read."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(_CHUNK):
            digest.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()
