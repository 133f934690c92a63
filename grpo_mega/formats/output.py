"""A folder that gets its name only when every tensor in it has been written, read back and found to be its source.

Until then it is OUT.partial, with a journal of the tensors that are written, so that the same conversion started again goes on
where it was. Workers are threads: they read and write blocks, which needs no lock of Python's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.formats.slices import Target
from grpo_mega.formats.sources import Files
from grpo_mega.formats.stream import BLOCK_BYTES, Streamer, has_nonfinite
from grpo_mega.observe.progress import Bar, progress

JOURNAL = "journal"
_SPARE_BYTES = 64 << 20  # left free on the disk
_SECONDS_BETWEEN_NOTES = 0.5


@dataclass(frozen=True)
class Item:
    """A tensor at a place of a file: `before`, its bytes, `after`. `crc_offsets`, from the item's beginning: where the CRC32 of
    its bytes goes, within `before` and `after`."""

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
    """`headers`: bytes at the beginning of a file. `last`: other files' bytes, or the files that are copied; without these no
    one takes the folder for a checkpoint. `inputs`: files that tensors are read from. `options`: what else counts for the
    result."""

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
        """Of the sources and of where everything goes."""
        stats = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p in self.inputs for s in (p.stat(),)]
        items = [(i.file, i.offset, i.target.name, i.target.dtype, i.target.num_bytes) for i in self.items]
        return f"{zlib.crc32(repr((stats, items, self.options)).encode()):08x}"


@dataclass
class Report:
    """What was done, in bytes and seconds. `resumed_bytes` of them had been written by an earlier start."""

    num_tensors: int = 0
    num_bytes: int = 0
    resumed_bytes: int = 0
    write_seconds: float = 0.0
    proof_seconds: float = 0.0
    nonfinite: list[str] = field(default_factory=list)


def check_free(out: Path) -> None:
    """Raises ConfigError if something is where the output shall be."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists; remove it or name another output")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}, where {out.name} shall be, is not a folder; make it or name another output")


def write(plan: OutputPlan, out: Path, workers: int, show_progress: bool = True) -> Report:
    """Writes and proves the folder. Raises ConfigError or WeightMappingError, having left nothing."""
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
                    raise ConfigError(f"{reason}; mend that or name another output") from None
                raise
    finally:
        torch.set_num_threads(threads)
    return report


@contextmanager
def _claimed(partial: Path) -> Iterator[Path]:
    """The journal's path, while no other process writes to the folder."""
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
    files, outputs = Files(), _Outputs(partial, plan.sizes)
    try:
        with progress(plan.num_bytes, "writing", show_progress, "bytes") as bar, _Notes(journal, plan.fingerprint()) as notes:
            left = []
            for number, item in enumerate(plan.items):
                if number in done:
                    report.resumed_bytes += item.target.num_bytes
                    bar.advance(item.target.num_bytes)
                else:
                    left.append(number)
            _run(workers, left, lambda: _Writer(plan, files, outputs, notes, bar))
        written = time.monotonic()
        outputs.sync()
        with progress(plan.num_bytes, "reading back", show_progress, "bytes") as bar:
            _run(workers, range(len(plan.items)), lambda: _Prover(plan, files, outputs, report, bar))
        outputs.sync()
        report.write_seconds, report.proof_seconds = written - began, time.monotonic() - written
    finally:
        outputs.close()
        files.close()
    report.nonfinite.sort()
    return report


def _resumed(plan: OutputPlan, partial: Path, journal: Path) -> set[int]:
    """The items that an earlier start has written. What it left of another conversion is removed."""
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
    """Takes the space for everything. Raises ConfigError if there is not enough."""
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
    for folder in (out, out.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


class _Outputs:
    """The files under way, open for reading and writing."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._descriptors = {name: os.open(folder / name, os.O_RDWR) for name in names}

    def write(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._descriptors[name], view, offset)
            view, offset = view[count:], offset + count

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptors[name], [buffer[done:]], offset + done)
            if not count:
                raise WeightMappingError(f"{name} ended at byte {offset + done} when it was read back; is the disk in order?")
            done += count

    def sync(self) -> None:
        for descriptor in self._descriptors.values():
            os.fsync(descriptor)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


class _Notes:
    """The journal, brought up to date from time to time."""

    def __init__(self, path: Path, fingerprint: str) -> None:
        self._path, self._lock, self._pending, self._flushed = path, threading.Lock(), [], time.monotonic()  # type: ignore[var-annotated]
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
    def __init__(self, plan: OutputPlan, files: Files, outputs: _Outputs, notes: _Notes, bar: Bar) -> None:
        self._items, self._outputs, self._notes, self._bar = plan.items, outputs, notes, bar
        self._streamer = Streamer(files)

    def __call__(self, number: int) -> None:
        item = self._items[number]
        offset = item.data_offset
        for block in self._streamer.blocks(item.target):
            self._outputs.write(item.file, offset, block)
            self._bar.advance(len(block))
            offset += len(block)
        self._notes.add(number)


class _Prover:
    """Reads a tensor's source once more, and what was written, and compares; only then its checksum is put into the file."""

    def __init__(self, plan: OutputPlan, files: Files, outputs: _Outputs, report: Report, bar: Bar) -> None:
        self._items, self._outputs, self._report, self._bar = plan.items, outputs, report, bar
        self._streamer = Streamer(files)
        self._buffer = bytearray(BLOCK_BYTES)

    def __call__(self, number: int) -> None:
        item = self._items[number]
        offset, crc, is_finite = item.data_offset, 0, True
        for block in self._streamer.blocks(item.target):
            found = self._read(item.file, offset, len(block))
            if not _equal(found, block):
                raise WeightMappingError(
                    f"{item.file} reads back otherwise than {item.target.name} was written to it; is the disk in order?"
                )
            crc = zlib.crc32(found, crc) if item.crc_offsets else 0
            is_finite = is_finite and not has_nonfinite(block, item.target.dtype)
            offset += len(block)
            self._bar.advance(len(block))
        if not is_finite:
            self._report.nonfinite.append(item.target.name)
        if item.before or item.after:
            self._frame(item, crc)

    def _frame(self, item: Item, crc: int) -> None:
        frame, length = bytearray(item.before + item.after), len(item.before)
        for place in item.crc_offsets:
            at = place if place < length else place - item.target.num_bytes
            frame[at : at + 4] = crc.to_bytes(4, "little")
        end = item.data_offset + item.target.num_bytes
        for offset, part in ((item.offset, frame[:length]), (end, frame[length:])):
            self._outputs.write(item.file, offset, part)
            if self._read(item.file, offset, len(part)) != part:
                raise WeightMappingError(f"{item.file} reads back otherwise than it was written; is the disk in order?")

    def _read(self, name: str, offset: int, length: int) -> memoryview:
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        view = memoryview(self._buffer)[:length]
        self._outputs.read_into(name, offset, view)
        return view


def _equal(a: memoryview, b: memoryview) -> bool:
    """Words are compared eight times as fast as bytes."""
    end = len(a) // 8 * 8
    if a[end:] != b[end:] or len(a) != len(b):
        return False
    return end == 0 or torch.equal(torch.frombuffer(a[:end], dtype=torch.int64), torch.frombuffer(b[:end], dtype=torch.int64))


def _run(workers: int, numbers: Iterable[int], make: Callable[[], Callable[[int], None]]) -> None:
    """Calls `make()(number)` for all numbers, each worker with what it made. Raises the first error of any."""
    queue, lock, errors = iter(numbers), threading.Lock(), []  # type: ignore[var-annotated]

    def work() -> None:
        try:
            act = make()
            while not errors:
                with lock:
                    number = next(queue, None)
                if number is None:
                    return
                act(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C comes to this thread
        errors.append(error)
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]
