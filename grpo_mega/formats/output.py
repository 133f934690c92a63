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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.formats.checkpoint_files import sync_folder
from grpo_mega.formats.slices import BLOCK_BYTES, Files, Target
from grpo_mega.formats.stream import Streamer, is_finite, torch_dtype
from grpo_mega.observe.progress import Bar, progress

JOURNAL = "journal"
_SPARE_BYTES = 64 << 20  # left free on the disk
_SECONDS_BETWEEN_NOTES = 0.5


@dataclass(frozen=True)
class Item:
    """A tensor at a place of a file: `before`, its bytes, `after`.

    The CRC32 of its bytes is written at `crc_offsets`, counted from the item's beginning, within `before` and `after`.
    """

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
def _claimed(partial: Path) -> Iterator[Path]:
    """Yield the journal's path, and keep other processes from writing to the folder meanwhile."""
    partial.mkdir(exist_ok=True)
    journal = partial / JOURNAL
    with journal.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{partial} is being written by another process; wait for it or name another output") from None
        yield journal


def _fill(plan: OutputPlan, partial: Path, journal: Path, workers: int, show_progress: bool) -> Report:
    began = time.monotonic()
    done = _resumed(plan, partial, journal)
    if not done:
        _allocate(plan, partial)
    report = Report(len(plan.items), plan.num_bytes)
    files, outputs = Files(), Files(os.O_RDWR)
    try:
        with progress(plan.num_bytes, "writing", show_progress, "bytes") as bar, _Notes(journal, plan.fingerprint()) as notes:
            left = []
            for number, item in enumerate(plan.items):
                if number in done:
                    report.resumed_bytes += item.target.num_bytes
                    bar.advance(item.target.num_bytes)
                else:
                    left.append(number)
            _run(workers, left, lambda: _Writer(partial, plan, files, outputs, notes, bar))
        written = time.monotonic()
        outputs.sync()
        with progress(plan.num_bytes, "reading back", show_progress, "bytes") as bar:
            _run(workers, range(len(plan.items)), lambda: _Verifier(partial, plan, files, outputs, report, bar))
        outputs.sync()
        report.write_seconds, report.verify_seconds = written - began, time.monotonic() - written
    finally:
        outputs.close()
        files.close()
    report.nonfinite.sort()
    return report


def _resumed(plan: OutputPlan, partial: Path, journal: Path) -> set[int]:
    """Return the items that an earlier start has written. Remove the remains of another conversion."""
    lines = journal.read_text().splitlines()
    is_same = lines and lines[0] == plan.fingerprint()
    if is_same and all((partial / name).exists() for name in plan.sizes):
        return {int(line) for line in lines[1:] if line.isdigit()}
    for path in partial.iterdir():
        if path.name != JOURNAL:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.truncate(journal, 0)
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
        path.write_bytes(content) if isinstance(content, bytes) else shutil.copyfile(content, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    (partial / JOURNAL).unlink()
    if out.exists():
        out.rmdir()  # it is empty
    os.rename(partial, out)
    sync_folder(out)
    sync_folder(out.parent)


class _Notes:
    """The journal, brought up to date from time to time."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._lock, self._flushed = path, threading.Lock(), time.monotonic()
        self._pending: list[int] = []
        if not path.stat().st_size:
            self._append(f"{fingerprint}\n")

    def __enter__(self) -> _Notes:
        return self

    def __exit__(self, *exc: object) -> None:
        self._flush()

    def add(self, number: int) -> None:
        with self._lock:
            self._pending.append(number)
            if time.monotonic() - self._flushed > _SECONDS_BETWEEN_NOTES:
                self._flush()

    def _flush(self) -> None:
        self._append("".join(f"{number}\n" for number in self._pending))
        self._pending, self._flushed = [], time.monotonic()

    def _append(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(text)


class _Writer:
    def __init__(self, folder: Path, plan: OutputPlan, files: Files, outputs: Files, notes: _Notes, bar: Bar) -> None:
        self._folder, self._items, self._outputs, self._notes, self._bar = folder, plan.items, outputs, notes, bar
        self._streamer = Streamer(files)

    def __call__(self, number: int) -> None:
        item = self._items[number]
        path, offset = self._folder / item.file, item.data_offset
        for block in self._streamer.blocks(item.target):
            self._outputs.write(path, offset, block)
            self._bar.advance(len(block))
            offset += len(block)
        self._notes.add(number)


class _Verifier:
    """Reads a tensor's source once more, and the written bytes, and compares; only then the checksum is put into the file."""

    def __init__(self, folder: Path, plan: OutputPlan, files: Files, outputs: Files, report: Report, bar: Bar) -> None:
        self._folder, self._items, self._outputs, self._report, self._bar = folder, plan.items, outputs, report, bar
        self._streamer = Streamer(files)
        self._buffer = bytearray(BLOCK_BYTES)

    def __call__(self, number: int) -> None:
        item = self._items[number]
        offset, crc, all_finite = item.data_offset, 0, True
        for block in self._streamer.blocks(item.target):
            written = self._read(item.file, offset, len(block))
            if not _equal(written, block):
                raise WeightMappingError(
                    f"{item.file} reads back otherwise than {item.target.name} was written to it; is the disk in order?"
                )
            crc = zlib.crc32(written, crc) if item.crc_offsets else 0
            all_finite = all_finite and is_finite(torch.frombuffer(block, dtype=torch_dtype(item.target.dtype)))
            offset += len(block)
            self._bar.advance(len(block))
        if not all_finite:
            self._report.nonfinite.append(item.target.name)
        if item.before or item.after:
            self._frame(item, crc)

    def _frame(self, item: Item, crc: int) -> None:
        """Write `before` and `after`, with the checksum in them."""
        frame, length = bytearray(item.before + item.after), len(item.before)
        for place in item.crc_offsets:
            at = place if place < length else place - item.target.num_bytes
            frame[at : at + 4] = crc.to_bytes(4, "little")
        end = item.data_offset + item.target.num_bytes
        for offset, part in ((item.offset, frame[:length]), (end, frame[length:])):
            self._outputs.write(self._folder / item.file, offset, part)
            if self._read(item.file, offset, len(part)) != part:
                raise WeightMappingError(f"{item.file} reads back otherwise than it was written; is the disk in order?")

    def _read(self, name: str, offset: int, length: int) -> memoryview:
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        view = memoryview(self._buffer)[:length]
        self._outputs.read_into(self._folder / name, offset, view)
        return view


def _equal(a: memoryview, b: memoryview) -> bool:
    """Compare two blocks as 64-bit words, which is eight times as fast as by bytes."""
    end = len(a) // 8 * 8
    if a[end:] != b[end:] or len(a) != len(b):
        return False
    return end == 0 or torch.equal(torch.frombuffer(a[:end], dtype=torch.int64), torch.frombuffer(b[:end], dtype=torch.int64))


def _run(workers: int, numbers: Iterable[int], make: Callable[[], Callable[[int], None]]) -> None:
    """Call `make()(number)` for all numbers; each worker makes its own. Raise an error of any worker, or Ctrl-C."""
    queue, lock, stopped = iter(numbers), threading.Lock(), threading.Event()

    def work() -> None:
        try:
            act = make()
            while not stopped.is_set():
                with lock:
                    number = next(queue, None)
                if number is None:
                    return
                act(number)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()
        finally:
            stopped.set()
