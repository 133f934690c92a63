"""A folder that gets its name only after every tensor was written, read back and compared with its source.

Until then it is OUT.partial, with a journal of the written tensors, so that restarting the same conversion continues
it. Workers are threads, because reading and writing blocks does not hold Python's lock.
"""

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from isal.isal_zlib import crc32  # 13 times as fast as zlib's

from grpo_mega.checkpoint_io.reader import Streamer, is_finite, torch_dtype
from grpo_mega.checkpoint_io.slices import Files, Target
from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.paths import check_free, sync_to_disk
from grpo_mega.tracking.progress import Bar, progress

JOURNAL = "journal"
_SPARE_BYTES = 64 << 20  # space to leave free on the disk


class Frame(NamedTuple):
    """The bytes around a tensor. The CRC32 of the tensor's bytes goes to `crc_offsets` of `after`, each in 4 bytes."""

    before: bytes = b""
    after: bytes = b""
    crc_offsets: tuple[int, ...] = ()


_NO_FRAME = Frame()


@dataclass(frozen=True)
class Item:
    """A tensor with its frame, starting at `offset` of a file."""

    file: str
    offset: int
    target: Target
    frame: Frame = _NO_FRAME

    @property
    def data_offset(self) -> int:
        return self.offset + len(self.frame.before)


@dataclass(frozen=True)
class OutputPlan:
    """The files to write with their sizes, the tensors in them, and `headers`, the bytes at the start of a file.

    `last`: contents of other files, or files to copy, written at the end; without them the folder is not a checkpoint.
    `inputs`: the files that tensors are read from. `options`: everything else that affects the result.
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
        """Return a digest of the inputs, the options, and the place of every tensor."""
        stats = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in self.inputs for s in (p.stat(),)]
        items = [(i.file, i.offset, i.target.name, i.target.dtype, i.target.num_bytes) for i in self.items]
        return f"{crc32(repr((stats, items, self.options)).encode()):08x}"


@dataclass
class Report:
    """The result of a conversion."""

    num_tensors: int = 0
    num_bytes: int = 0
    resumed_bytes: int = 0  # part of num_bytes that an earlier attempt wrote
    write_seconds: float = 0.0
    verify_seconds: float = 0.0
    nonfinite: list[str] = field(default_factory=list)  # names of tensors with NaN or infinity


def write(plan: OutputPlan, out: Path, workers: int, show_progress: bool = True) -> Report:
    """Write and verify the folder. Raise ConfigError or WeightMappingError; then no output is left behind."""
    check_free(out)
    partial = out.with_name(out.name + ".partial")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        partial.mkdir(exist_ok=True)
        with (partial / JOURNAL).open("a+b", buffering=0) as journal:
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"{partial} is being written by another process; wait for it or name another output"
                ) from None
            try:
                report = _fill(plan, partial, journal, workers, show_progress)
                publish_folder(partial, out, plan.last)
            except (ConfigError, WeightMappingError, OSError) as error:
                shutil.rmtree(partial)
                if isinstance(error, OSError):
                    reason = f"{partial} cannot be written ({error.strerror}); nothing of it was kept"
                    raise ConfigError(f"{reason}; solve this or name another output") from None
                raise
    finally:
        torch.set_num_threads(threads)
    return report


def _fill(plan: OutputPlan, partial: Path, journal: FileIO, workers: int, show_progress: bool) -> Report:
    started_at = time.monotonic()
    journal.seek(0)
    fingerprint, *numbers = journal.read().decode().splitlines() or [""]
    done: set[int] = set()  # the items that an earlier attempt wrote
    if fingerprint == plan.fingerprint() and all((partial / name).exists() for name in plan.sizes):
        done = {int(number) for number in numbers if number.isdigit()}
    else:  # remove the remains of another conversion
        for path in partial.iterdir():
            if path.name != JOURNAL:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        journal.truncate(0)
        journal.write(f"{plan.fingerprint()}\n".encode())
    if not done:
        needed, free = sum(plan.sizes.values()) + _SPARE_BYTES, shutil.disk_usage(partial).free
        if needed > free:
            raise ConfigError(
                f"{partial.parent} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed; free some"
            )
        for name, size in plan.sizes.items():
            with (partial / name).open("wb") as file:
                file.write(plan.headers.get(name, b""))
                file.flush()
                os.posix_fallocate(file.fileno(), 0, size)  # reserves the space
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
        with (
            progress(plan.num_bytes, "reading back", show_progress, "bytes") as bar,
            ThreadPoolExecutor(workers) as pool,
        ):
            list(pool.map(verify_item, plan.items))
        outputs.sync()
    report.write_seconds, report.verify_seconds = written - started_at, time.monotonic() - written
    report.nonfinite.sort()
    return report


def make_partial(out: Path) -> Path:
    """Return an empty OUT.partial, without the remains of an earlier attempt."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def publish_folder(partial: Path, out: Path, last: Mapping[str, bytes | Path]) -> None:
    """Write the `last` files, contents or files to copy, and rename the folder. `out` may be an empty folder."""
    for name, content in last.items():
        path = partial / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content) if isinstance(content, bytes) else shutil.copyfile(content, path)
        sync_to_disk(path)
    (partial / JOURNAL).unlink(missing_ok=True)
    if out.exists():
        out.rmdir()
    os.rename(partial, out)
    sync_to_disk(out)
    sync_to_disk(out.parent)


class _Copier(threading.local):
    """Writes tensors and reads them back. Each thread gets a separate instance with separate buffers at first use."""

    def __init__(self, folder: Path, files: Files, outputs: Files) -> None:
        self._folder, self._outputs, self._streamer = folder, outputs, Streamer(files)
        self._buffer = bytearray(0)

    def write(self, item: Item, bar: Bar) -> None:
        offset = item.data_offset
        for block in self._streamer.blocks(item.target):
            self._outputs.write(self._folder / item.file, offset, block)
            bar.advance(len(block))
            offset += len(block)

    def verify(self, item: Item, bar: Bar) -> bool:
        """Read a tensor's source again and compare. Only then write the bytes around the tensor, with its checksum.

        Return False if an element is NaN or infinite. Raise WeightMappingError if the bytes differ.
        """
        offset, crc, all_finite = item.data_offset, 0, True
        for block in self._streamer.blocks(item.target):
            written = self._read(item.file, offset, len(block))
            if written != block:
                raise WeightMappingError(
                    f"{item.file}: {item.target.name} differs from its source when read back; check the disk"
                )
            crc = crc32(written, crc) if item.frame.crc_offsets else 0
            all_finite = all_finite and is_finite(torch.frombuffer(block, dtype=torch_dtype(item.target.dtype)))
            offset += len(block)
            bar.advance(len(block))
        after = bytearray(item.frame.after)
        for place in item.frame.crc_offsets:
            after[place : place + 4] = crc.to_bytes(4, "little")
        for start, part in ((item.offset, item.frame.before), (offset, after)) if after else ():
            self._outputs.write(self._folder / item.file, start, part)
            if self._read(item.file, start, len(part)) != part:
                raise WeightMappingError(f"{item.file} differs from what was written when read back; check the disk")
        return all_finite

    def _read(self, name: str, offset: int, length: int) -> bytearray:
        """Return bytes of an output, valid until the next call. A bytearray compares with a block at memory speed."""
        if len(self._buffer) != length:
            self._buffer = bytearray(length)
        self._outputs.read_into(self._folder / name, offset, memoryview(self._buffer))
        return self._buffer
