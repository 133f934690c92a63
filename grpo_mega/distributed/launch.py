"""Start the ranks of a job: `launch(act, request, ...)` runs `act(request)` on each of them, and returns one exit code
for all.

A process becomes a rank in one of three ways, and runs the same function in each: torchrun or Slurm has set its RANK,
it is the only rank of its job, or a launcher has started it as `grpo-mega rank` with the function in stdin.

Rank 0 writes to the terminal, and other ranks write to log_dir/rank_N.log. When a rank fails, the other ranks get
SIGTERM and 10 s later SIGKILL, and one line reports the rank, its exit code and the end of its log. A signal to the
launcher is forwarded once to every rank. No rank outlives the launcher, however either ends: each rank leads a separate
process group, and the group is killed when the rank is gone. The kernel kills each rank when the launcher dies.

The launcher reads the memory of its ranks every second. If a rank is killed by SIGKILL, the line reports how much the
rank held. It names memory as the probable cause if the kernel has counted such a kill, or if little memory was free.

Ctrl-C is answered at once, whatever the main thread does. Python calls the handler of a signal in the main thread,
after a running call of a library returns. A collective may wait for minutes. So Python also writes the signal's number
to a socket at once, and a thread reads it. The first rank answers on the terminal. Processes that this process forks do
not write to the socket.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, TypeVar

from grpo_mega import processes
from grpo_mega.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, ConfigError
from grpo_mega.paths import rank_log
from grpo_mega.processes import GIB, die_with_parent, host_room, num_killed_for_memory, resident_bytes

KEY_VARIABLE = "GRPO_MEGA_RUN_KEY"  # the key of the run's messages, a random text (distributed/messages.py)
REQUEST = Path("/dev/stdin")  # opening it starts at the beginning in every rank, although all ranks share the file
PORTS = range(10000, 20000)
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_STOP = 10.0
SECONDS_FOR_RANK_0_TO_FAIL = 10.0
SECONDS_BETWEEN_READINGS = 1.0  # the launcher reads the memory of its ranks
SECONDS_FOR_A_KILLED_RANK = 0.5  # a rank that is killed while it holds much memory ends after ranks that miss it
LITTLE_MEMORY = 0.1  # share of the memory; with less available, a kill may be the kernel's
LINES_OF_LOG = 5
Request = TypeVar("Request")


@dataclass
class Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None  # None if the rank writes to the terminal
    log_start: int  # size of the log in bytes before this run
    is_signalled: bool = False  # the launcher has forwarded its signal to this rank
    resident: int = 0  # bytes of memory when they were last read


def current_rank() -> int | None:
    """Return the rank that a launcher has set for this process; None without one. Raise ConfigError without
    WORLD_SIZE.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is None:
        return None
    if not world_size.isdecimal():
        raise ConfigError(f"RANK={rank} is set but WORLD_SIZE={world_size!r}; start with torchrun, or unset RANK")
    return int(rank)


def launch(act: Callable[[Request], None], request: Request, world_size: int, log_dir: Path) -> int:
    """Run `act(request)` on all ranks. Return 0, or the exit code of the first local rank that failed.

    The only rank of a job, and a rank of torchrun, run it in this process.
    """
    if current_rank() is not None:
        act(request)
    elif world_size == 1:
        with only_rank():
            act(request)
    else:
        return launch_processes(act, request, world_size, log_dir)
    return 0


def launch_processes(act: Callable[[Request], None], request: Request, world_size: int, log_dir: Path) -> int:
    """Run `act(request)` in `world_size` new processes. `act` is a function of a module. Return the exit code, as
    `launch`.
    """
    print(f"starting {world_size} rank{'s' if world_size > 1 else ''}", flush=True)
    with open(os.memfd_create("request"), "wb", buffering=0) as file:
        file.write(pickle.dumps((act, request)))
        return run_ranks([sys.executable, "-m", "grpo_mega.cli", "rank"], world_size, log_dir, stdin=file.fileno())


def run_request() -> None:
    """Run the function that `launch_processes` has passed to this rank."""
    act, request = pickle.loads(REQUEST.read_bytes())
    act(request)


def run_ranks(command: list[str], world_size: int, log_dir: Path, stdin: int = subprocess.DEVNULL) -> int:
    """Run `command` as `world_size` local ranks. Return 0, or the exit code of the first rank that failed.

    The exit code of a rank that was killed by a signal is 128 + the signal's number.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    processes.remove_unused_folders()
    environments = rank_environments(os.environ, world_size)
    ranks: list[Rank] = []
    with _signals_passed_on(ranks) as caught:
        try:
            for number, environment in enumerate(environments):
                log = None if number == 0 else log_dir / rank_log(number)
                log_start = log.stat().st_size if log is not None and log.exists() else 0
                with contextlib.ExitStack() as stack:
                    output: IO[bytes] | None = None if log is None else stack.enter_context(log.open("ab"))
                    process = subprocess.Popen(
                        command,
                        env=environment,
                        stdin=stdin,
                        stdout=output,
                        stderr=None if log is None else subprocess.STDOUT,
                        process_group=0,  # Ctrl-C reaches only the launcher, and the launcher forwards it once
                        preexec_fn=partial(die_with_launcher, os.getpid()),
                    )
                ranks.append(Rank(number, process, log, log_start))
                if caught:  # the signal may have come before the rank was in the list
                    _pass_on(ranks, caught[0])
            return _wait(ranks, caught)
        finally:
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)  # the rank, if it is alive, and its child processes
                rank.process.wait()
            processes.remove_unused_folders()  # killed ranks leave folders


def rank_environments(environ: Mapping[str, str], world_size: int) -> list[dict[str, str]]:
    """Return the environment of each rank: torchrun's variables on a free port, a new key, and a fair share of the
    cores.
    """
    threads = max(1, num_cores() // world_size)
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        KEY_VARIABLE: secrets.token_hex(32),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(threads)),
        # Waiting threads that spin take the cores from other threads, which is ten times slower on a busy machine.
        "OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY", "passive"),
        "PYTHONUNBUFFERED": "1",
    }
    return [{**environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


@contextlib.contextmanager
def only_rank() -> Iterator[None]:
    """Set the environment of a job with one rank in this process during the context."""
    before = dict(os.environ)
    os.environ.update(rank_environments(os.environ, world_size=1)[0])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def free_port() -> int:
    return free_ports(1)[0]


def free_ports(count: int, among: range = PORTS) -> list[int]:
    """Return `count` ports without a listening process. Raise OSError if there are fewer.

    `among` is below the kernel's ports for clients, because a client could take a port before it is used.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(among, len(among)):
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(
        f"fewer than {count} ports from {among.start} to {among.stop - 1} are free; end processes that use them"
    )


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def log_lines(log: Path, start: int) -> list[str]:
    """Return the lines of a log after its first `start` bytes, without empty lines; [] if the file does not exist."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(start)
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def log_tail(log: Path, start: int) -> str:
    """Return the path of the log and its last lines after `start`, as one line."""
    return f"{log} ends: " + (" | ".join(log_lines(log, start)[-LINES_OF_LOG:]) or "(empty)")


def exit_description(code: int) -> str:
    """Describe how a process ended. `code` is negative after a signal, as in subprocess."""
    return f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def die_with_launcher(launcher: int) -> None:
    """Make the kernel kill this process when its launcher dies, if the kernel supports it. Use it as preexec_fn."""
    with contextlib.suppress(OSError):
        die_with_parent(launcher)


@contextlib.contextmanager
def _signals_passed_on(ranks: list[Rank]) -> Iterator[list[int]]:
    """Forward the first SIGINT or SIGTERM to all ranks. Send SIGKILL for a second one. Yield the list of caught
    signals.
    """
    caught: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) == 1:
            _pass_on(ranks, number)
        else:
            _send(ranks, signal.SIGKILL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[Rank], caught: list[int]) -> int:
    """Wait until all ranks have ended. If a rank fails, end the other ranks. Return the exit code of the run."""
    read_at, failed, is_short = 0.0, None, False
    num_killed = num_killed_for_memory()
    while failed is None:
        if time.monotonic() - read_at >= SECONDS_BETWEEN_READINGS:
            read_at, room = time.monotonic(), host_room()
            is_short = room.available < LITTLE_MEMORY * room.total
            for rank in ranks:
                rank.resident = resident_bytes(rank.process.pid) or rank.resident
        codes = [rank.process.poll() for rank in ranks]
        failed = next((rank for rank, code in zip(ranks, codes, strict=True) if code), None)
        if failed is None:
            if None not in codes:
                return 0
            time.sleep(SECONDS_BETWEEN_LOOKS)
    if failed.process.returncode > 0 and not caught:
        _wait_for([r for r in ranks if r is not failed], SECONDS_FOR_A_KILLED_RANK)
        failed = next((rank for rank in ranks if (rank.process.returncode or 0) < 0), failed)
    is_user_error = failed.process.returncode == EXIT_USER_ERROR
    if is_user_error and failed.rank != 0:
        # Most user errors are raised on every rank. Prefer rank 0, because it prints to the terminal.
        _wait_for(ranks[:1], SECONDS_FOR_RANK_0_TO_FAIL)
        if ranks[0].process.returncode == EXIT_USER_ERROR:
            failed = ranks[0]
    if not caught:
        _send(ranks, signal.SIGTERM)
    _wait_for(ranks, SECONDS_TO_STOP)
    _send(ranks, signal.SIGKILL)
    code = failed.process.returncode
    if len(caught) > 1:  # it was killed for the second signal
        show_cursor()
        return EXIT_INTERRUPTED
    if not caught and not (is_user_error and failed.rank == 0):
        log = "see above" if failed.log is None else log_tail(failed.log, failed.log_start)
        killed = ""
        if code == -signal.SIGKILL:  # report what the rank held, and what it could hold
            everyone = sum(rank.resident for rank in ranks)
            of_all = f"; {len(ranks)} ranks: {everyone / GIB:.1f} GiB" if len(ranks) > 1 else ""
            of = "" if room.limit == "this machine" else f" in {room.limit}"
            held = f"{failed.resident / GIB:.1f} GiB of {room.total / GIB:.0f}{of}{of_all}"
            is_short |= num_killed_for_memory() > num_killed
            killed = f"{', probably out of memory' * is_short} (last seen {held}); see dmesg"
        print(f"grpo-mega: rank {failed.rank} {exit_description(code)}{killed}; {log}", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _wait_for(ranks: list[Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _pass_on(ranks: list[Rank], number: int) -> None:
    """Send a signal to every rank that has not received one."""
    for rank in ranks:
        if not rank.is_signalled:
            rank.is_signalled = True
            _send([rank], number)


def _send(ranks: list[Rank], number: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_handled(handle: Callable[[int], None], numbers: Collection[int] = STOP_SIGNALS) -> Iterator[None]:
    """Call `handle` with the number of each of these signals, in a thread, during the context.

    Only the main thread may enter the context. The signals do not interrupt it.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    earlier_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    # Only a signal with a handler is written to the socket, so each gets one that does nothing.
    earlier = {number: signal.signal(number, lambda *_: None) for number in numbers}

    def read() -> None:
        while caught := reader.recv(1):
            if caught[0] in numbers:
                handle(caught[0])
        reader.close()

    thread = threading.Thread(target=read, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(earlier_fd)
        writer.close()
        thread.join()


def ends_at_first(what: str, numbers: Collection[int] = STOP_SIGNALS) -> AbstractContextManager[None]:
    """Return a context in which the first signal ends the process. `what` tells the user of a Ctrl-C what happens."""

    def end(number: int) -> None:
        if number == signal.SIGINT:
            answer_interrupt(what)
        end_now()

    return signals_handled(end, numbers)


def answer_interrupt(text: str) -> None:
    """Print a line on the terminal, if this is the first rank or no rank."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(f"\ngrpo-mega: {text}", file=sys.stderr, flush=True)


def end_now() -> NoReturn:
    """End this process as if it was killed, but remove its temporary folders. Its child processes end with it."""
    try:
        processes.remove_own_folders()
        show_cursor()
    finally:
        os._exit(EXIT_INTERRUPTED)


def show_cursor() -> None:
    """Show the cursor of the terminal, because a progress bar hides it and may have been killed."""
    with suppress(OSError):
        if os.isatty(sys.stdout.fileno()):
            os.write(sys.stdout.fileno(), b"\x1b[?25h")


def _forget() -> None:
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)
