"""A folder that gets its name only when every tensor in it has been written, read back and found equal to its source.

Until then it is OUT.partial, with a journal of the tensors that are written, so that the same conversion started again goes on
where it was. Workers are threads: reading and writing blocks does not hold Python's lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import torch

from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.formats.checkpoint_files import sync_folder
from grpo_mega.formats.slices import BLOCK_BYTES, Files, Target
from grpo_mega.formats.stream import Streamer, is_finite, torch_dtype
from grpo_mega.observe.progress import Bar, progress

JOURNAL = "journal"
_SPARE_BYTES = 64 << 20  # left free on the disk


@dataclass(frozen=True)
class Item:
    """A tensor at a place of a file: `before`, its bytes, `after`, with the CRC32 of its bytes at `crc_offsets` of `after`."""

    file: str
    offset: int
    target: Target
    before: bytes = b""
    after: bytes = b""
    crc_offsets: tuple[int, ...] = ()

    @property
    def data_offset(self) -> int:
        return self.offset + len(self.before)


@dataclass(frozen=True)
class OutputPlan:
    """The files to write and their sizes, the tensors in them, and `headers`, bytes at the beginning of a file.

    `last`: other files' bytes, or the files that are copied; without these the folder is no checkpoint. `inputs`: the files
    that tensors are read from. `options`: all else that the result depends on.
    """

    sizes: dict[str, int]
    items: list[Item]
    headers: dict[str, bytes]
    last: dict[str, bytes | Path]
    inputs: list[Path]
    options: str

    @property
    def num_bytes(self) -> int:
        return sum(item.target.num_bytes for item in self.items)

    def fingerprint(self) -> str:
        """Return a digest of the inputs and of the place of every tensor."""
        stats = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in self.inputs for s in (p.stat(),)]
        items = [(i.file, i.offset, i.target.name, i.target.dtype, i.target.num_bytes) for i in self.items]
        return f"{zlib.crc32(repr((stats, items, self.options)).encode()):08x}"


@dataclass
class Report:
    """The result of a conversion."""

    num_tensors: int = 0
    num_bytes: int = 0
    resumed_bytes: int = 0  # of num_bytes, written by an earlier start
    write_seconds: float = 0.0
    verify_seconds: float = 0.0
    nonfinite: list[str] = field(default_factory=list)  # names of tensors with NaN or infinity


def check_free(out: Path) -> None:
    """Raise ConfigError unless the output's place is free."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists; remove it or name another output")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}, where {out.name} shall be, is not a folder; make it or name another output")


def write(plan: OutputPlan, out: Path, workers: int, show_progress: bool = True) -> Report:
    """Write and verify the folder. Raise ConfigError or WeightMappingError, and then leave nothing behind."""
    check_free(out)
    partial = out.with_name(out.name + ".partial")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _claimed(partial) as journal:
            try:
                report = _fill(plan, partial, journal, workers, show_progress)
                _publish(plan, partial, out)
            except (ConfigError, WeightMappingError, OSError) as error:
                shutil.rmtree(partial)
                if isinstance(error, OSError):
                    reason = f"{partial} cannot be written ({error.strerror}); nothing of it was kept"
                    raise ConfigError(f"{reason}; solve this or name another output") from None
                raise
    finally:
        torch.set_num_threads(threads)
    return report


@contextmanager
def _claimed(partial: Path) -> Iterator[FileIO]:
    """Yield the journal, and keep other processes from writing to the folder meanwhile."""
    partial.mkdir(exist_ok=True)
    with (partial / JOURNAL).open("a+b", buffering=0) as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{partial} is being written by another process; wait for it or name another output") from None
        yield journal


def _fill(plan: OutputPlan, partial: Path, journal: FileIO, workers: int, show_progress: bool) -> Report:
    began = time.monotonic()
    done = _resumed(plan, partial, journal)
    if not done:
        _allocate(plan, partial)
    report = Report(len(plan.items), plan.num_bytes, sum(plan.items[number].target.num_bytes for number in done))
    with closing(Files()) as files, closing(Files(os.O_RDWR)) as outputs:
        copier = _Copier(partial, files, outputs)

        def write_item(number: int) -> None:
            copier.write(plan.items[number], bar)
            journal.write(f"{number}\n".encode())

        def verify_item(item: Item) -> None:
            if not copier.verify(item, bar):
                report.nonfinite.append(item.target.name)

        with progress(plan.num_bytes, "writing", show_progress, "bytes") as bar, ThreadPoolExecutor(workers) as pool:
            bar.advance(report.resumed_bytes)
            list(pool.map(write_item, [number for number in range(len(plan.items)) if number not in done]))
        written = time.monotonic()
        outputs.sync()
        with progress(plan.num_bytes, "reading back", show_progress, "bytes") as bar, ThreadPoolExecutor(workers) as pool:
            list(pool.map(verify_item, plan.items))
        outputs.sync()
    report.write_seconds, report.verify_seconds = written - began, time.monotonic() - written
    report.nonfinite.sort()
    return report


def _resumed(plan: OutputPlan, partial: Path, journal: FileIO) -> set[int]:
    """Return the items that an earlier start has written. Remove the remains of another conversion."""
    journal.seek(0)
    fingerprint, *numbers = journal.read().decode().splitlines() or [""]
    if fingerprint == plan.fingerprint() and all((partial / name).exists() for name in plan.sizes):
        return {int(number) for number in numbers if number.isdigit()}
    for path in partial.iterdir():
        if path.name != JOURNAL:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    journal.truncate(0)
    journal.write(f"{plan.fingerprint()}\n".encode())
    return set()


def _allocate(plan: OutputPlan, partial: Path) -> None:
    """Reserve the space for all files. Raise ConfigError if there is not enough."""
    needed, free = sum(plan.sizes.values()) + _SPARE_BYTES, shutil.disk_usage(partial).free
    if needed > free:
        raise ConfigError(f"{partial.parent} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed; free some")
    for name, size in plan.sizes.items():
        with (partial / name).open("wb") as file:
            file.write(plan.headers.get(name, b""))
            file.flush()
            os.posix_fallocate(file.fileno(), 0, size)


def _publish(plan: OutputPlan, partial: Path, out: Path) -> None:
    for name, content in plan.last.items():
        path = partial / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else shutil.copyfile(content, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    (partial / JOURNAL).unlink()
    if out.exists():
        out.rmdir()  # it is empty
    os.rename(partial, out)
    sync_folder(out)
    sync_folder(out.parent)


class _Copier(threading.local):
    """Writes tensors and reads them back. Every thread has an instance of its own, made by its first use, with its buffers."""

    def __init__(self, folder: Path, files: Files, outputs: Files) -> None:
        self._folder, self._outputs, self._streamer = folder, outputs, Streamer(files)
        self._buffer = bytearray(BLOCK_BYTES)

    def write(self, item: Item, bar: Bar) -> None:
        offset = item.data_offset
        for block in self._streamer.blocks(item.target):
            self._outputs.write(self._folder / item.file, offset, block)
            bar.advance(len(block))
            offset += len(block)

    def verify(self, item: Item, bar: Bar) -> bool:
        """Read a tensor's source once more, and compare. Only then write what stands around it, with its checksum.

        Return False if an element is NaN or infinite. Raise WeightMappingError for other bytes than were written.
        """
        offset, crc, all_finite = item.data_offset, 0, True
        for block in self._streamer.blocks(item.target):
            written = self._read(item.file, offset, len(block))
            if written != block:
                raise WeightMappingError(
                    f"{item.file} reads back otherwise than {item.target.name} was written to it; is the disk in order?"
                )
            crc = zlib.crc32(written, crc) if item.crc_offsets else 0
            all_finite = all_finite and is_finite(torch.frombuffer(block, dtype=torch_dtype(item.target.dtype)))
            offset += len(block)
            bar.advance(len(block))
        if item.crc_offsets:
            self._write_frame(item, crc)
        return all_finite

    def _write_frame(self, item: Item, crc: int) -> None:
        """Write `before` and `after`, with the checksum in it."""
        after = bytearray(item.after)
        for place in item.crc_offsets:
            after[place : place + 4] = crc.to_bytes(4, "little")
        for offset, part in ((item.offset, item.before), (item.data_offset + item.target.num_bytes, after)):
            self._outputs.write(self._folder / item.file, offset, part)
            if self._read(item.file, offset, len(part)) != part:
                raise WeightMappingError(f"{item.file} reads back otherwise than it was written; is the disk in order?")

    def _read(self, name: str, offset: int, length: int) -> bytearray:
        """Return bytes of an output, valid until the next call. A bytearray compares with a block at the speed of memory."""
        if len(self._buffer) != length:
            self._buffer = bytearray(length)
        self._outputs.read_into(self._folder / name, offset, memoryview(self._buffer))
        return self._buffer
