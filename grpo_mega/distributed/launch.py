"""Start the ranks of a run on this machine, as torchrun does on many: one process per rank, one exit code for all.

Rank 0 has the terminal; the output of the others goes to log_dir/rank_N.log. When a rank fails, the others get SIGTERM and
10 s later SIGKILL, and one line names the rank, its exit code and the end of its log. A signal to the launcher is passed on
once to every rank. Invariant: no rank outlives the launcher, however either ends: each rank leads its own process group,
which is killed when the rank is gone, and asks the kernel to be killed with the launcher.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from grpo_mega import temporary
from grpo_mega.errors import EXIT_USER_ERROR
from grpo_mega.processes import die_with_parent

KEY_VARIABLE = "GRPO_MEGA_RUN_KEY"  # the key of the run's messages, a random text: distributed/messages.py
PORTS = range(10000, 20000)
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_STOP = 10.0
SECONDS_FOR_RANK_0_TO_FAIL = 10.0
LINES_OF_LOG = 5


@dataclass
class Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None  # None: writes to the terminal
    log_start: int  # bytes that the log held before this run
    is_signalled: bool = False  # has been sent the signal that the launcher caught


def launch_local(argv: list[str], world_size: int, log_dir: Path) -> int:
    """Run `grpo-mega *argv` as `world_size` local ranks; return 0, or the exit code of the first rank that failed."""
    return run_ranks([sys.executable, "-m", "grpo_mega.cli", *argv], world_size, log_dir)


def run_ranks(command: list[str], world_size: int, log_dir: Path) -> int:
    """Run `command` as `world_size` local ranks; return 0, or the exit code of the first rank that failed.

    A rank killed by a signal counts as 128 + the signal's number.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    temporary.remove_unused()
    environments = rank_environments(os.environ, world_size)
    ranks: list[Rank] = []
    with _signals_passed_on(ranks) as caught:
        try:
            for number, environment in enumerate(environments):
                ranks.append(_start(number, command, environment, log_dir))
                if caught:  # while the rank was being started, so that the handler did not know it
                    _pass_on(ranks, caught[0])
            return _wait(ranks, caught)
        finally:
            for rank in ranks:
                _kill_group(rank)
                rank.process.wait()
            temporary.remove_unused()  # of ranks that were killed


def rank_environments(environ: Mapping[str, str], world_size: int) -> list[dict[str, str]]:
    """Return the environment of each rank: torchrun's variables on a free port, a new key, and a fair share of the cores."""
    threads = max(1, num_cores() // world_size)
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        KEY_VARIABLE: secrets.token_hex(32),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(threads)),
        # Threads that spin while they wait take the cores from one another: ten times slower on a busy machine.
        "OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY", "passive"),
        "PYTHONUNBUFFERED": "1",
    }
    return [{**environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


@contextlib.contextmanager
def only_rank() -> Iterator[None]:
    """Give this process the environment of a job's only rank while the context lasts."""
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
    """Return ports on which no process listens. Raise OSError if there are fewer than `count`.

    `among` lies below the ports that the kernel gives to clients: those may be taken before the port is used.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(among, len(among)):
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"fewer than {count} ports from {among.start} to {among.stop - 1} are free; end processes that hold them")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def log_lines(log: Path, start: int) -> list[str]:
    """Return the lines of a log after its first `start` bytes, without empty ones; none if there is no such file."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(start)
        return [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def log_tail(log: Path, start: int) -> str:
    """Return the last of these lines, joined into one, behind the path of the log."""
    return f"{log} ends: " + (" | ".join(log_lines(log, start)[-LINES_OF_LOG:]) or "(empty)")


def exit_description(code: int) -> str:
    """Describe how a process ended; `code` is negative after a signal, as subprocess has it."""
    return f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def die_with_launcher(launcher: int) -> None:
    """Have the kernel kill this process with its launcher, where the kernel can do that; for subprocess's preexec_fn."""
    with contextlib.suppress(OSError):
        die_with_parent(launcher)


def _start(rank: int, command: list[str], environment: dict[str, str], log_dir: Path) -> Rank:
    log = None if rank == 0 else log_dir / f"rank_{rank}.log"
    start = log.stat().st_size if log is not None and log.exists() else 0
    with contextlib.ExitStack() as stack:
        output: IO[bytes] | None = None if log is None else stack.enter_context(log.open("ab"))
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if log is None else subprocess.STDOUT,
            process_group=0,  # a Ctrl-C reaches the launcher only, which passes it on once
            preexec_fn=partial(die_with_launcher, os.getpid()),
        )
    return Rank(rank, process, log, start)


@contextlib.contextmanager
def _signals_passed_on(ranks: list[Rank]) -> Iterator[list[int]]:
    """Pass the first SIGINT or SIGTERM on to all ranks, a second one as SIGKILL; yield the list of those caught."""
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
    """Wait until all ranks have ended; end the others when one fails. Return the exit code of the run."""
    failed = _first_failure(ranks)
    if failed is None:
        return 0
    is_user_error = failed.process.returncode == EXIT_USER_ERROR
    if is_user_error and failed.rank != 0:
        # Most user errors are raised on every rank, and rank 0 prints to the terminal.
        _wait_for(ranks[:1], SECONDS_FOR_RANK_0_TO_FAIL)
        if ranks[0].process.returncode == EXIT_USER_ERROR:
            failed = ranks[0]
    if not caught:
        _send(ranks, signal.SIGTERM)
    _wait_for(ranks, SECONDS_TO_STOP)
    _send(ranks, signal.SIGKILL)
    code = failed.process.returncode
    if not caught and not (is_user_error and failed.rank == 0):
        log = "see above" if failed.log is None else log_tail(failed.log, failed.log_start)
        print(f"grpo-mega: rank {failed.rank} {exit_description(code)}; {log}", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _first_failure(ranks: list[Rank]) -> Rank | None:
    """Wait for a rank that ends with an exit code other than 0; return None once all have ended with 0."""
    while True:
        codes = [rank.process.poll() for rank in ranks]
        for rank, code in zip(ranks, codes, strict=True):
            if code:
                return rank
        if None not in codes:
            return None
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _wait_for(ranks: list[Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _pass_on(ranks: list[Rank], number: int) -> None:
    """Send a signal to every rank that has not had one."""
    for rank in ranks:
        if not rank.is_signalled:
            rank.is_signalled = True
            _send([rank], number)


def _send(ranks: list[Rank], number: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


def _kill_group(rank: Rank) -> None:
    """Kill the rank, if it is alive, and the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, signal.SIGKILL)
