"""Starts the ranks of a run on this machine, as torchrun would on many: one process a rank, one exit code for all.

Rank 0 has the terminal; the output of the others goes to log_dir/rank_N.log. When a rank fails, the others get SIGTERM and
10 s later SIGKILL, and one line names the rank, its exit code and the end of its log. A signal to the launcher is passed on
once to every rank. Invariant: no rank outlives the launcher, however either ends (each rank leads its own process group,
which is killed when the rank is gone, and asks the kernel to be killed with the launcher).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from grpo_mega.errors import EXIT_USER_ERROR

PORTS = range(10000, 20000)
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_STOP = 10.0
SECONDS_FOR_RANK_0_TO_SPEAK = 2.0
LINES_OF_LOG = 5

_PR_SET_PDEATHSIG = 1


@dataclass
class Rank:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None  # None: writes to the terminal
    log_start: int  # bytes that the log held before this run
    is_told: bool = False  # of the signal that the launcher caught

    def tail(self) -> str:
        """The last lines that this run wrote to the log, joined into one."""
        if self.log is None:
            return "see above"
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return f"{self.log} ends: " + (" | ".join(lines[-LINES_OF_LOG:]) or "(empty)")


def launch_local(argv: list[str], world_size: int, log_dir: Path) -> int:
    """Runs `grpo-mega *argv` as `world_size` local ranks; returns 0, or the exit code of the first rank that failed."""
    return run_ranks([sys.executable, "-m", "grpo_mega.cli", *argv], world_size, log_dir)


def run_ranks(command: list[str], world_size: int, log_dir: Path) -> int:
    """Runs `command` as `world_size` local ranks; returns 0, or the exit code of the first rank that failed.

    A rank killed by a signal counts as 128 + the signal's number.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    environments = rank_environments(os.environ, world_size)
    ranks: list[Rank] = []
    with _signals_passed_on(ranks) as caught:
        try:
            for number, environment in enumerate(environments):
                ranks.append(_start(number, command, environment, log_dir))
                if caught:  # while the rank was being started, so the handler did not know of it
                    _tell(ranks, caught[0])
            return _wait(ranks, caught)
        finally:
            for rank in ranks:
                _kill_group(rank)
                rank.process.wait()


def rank_environments(environ: Mapping[str, str], world_size: int) -> list[dict[str, str]]:
    """The environment of each rank: torchrun's variables on a free port, and a fair share of the cores."""
    threads = max(1, num_cores() // world_size)
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", str(threads)),
        # Threads that spin while they wait take the cores from one another: ten times slower on a busy machine.
        "OMP_WAIT_POLICY": environ.get("OMP_WAIT_POLICY", "passive"),
        "PYTHONUNBUFFERED": "1",
    }
    return [{**environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


@contextlib.contextmanager
def only_rank() -> Iterator[None]:
    """The environment of a job's only rank, in this process, while the context lasts."""
    before = dict(os.environ)
    os.environ.update(rank_environments(os.environ, world_size=1)[0])
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def free_port() -> int:
    """A port that no one listens on, from below those that the kernel gives to clients: they come and go until it is used."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
            preexec_fn=die_with_parent(os.getpid()),
        )
    return Rank(rank, process, log, start)


def die_with_parent(launcher: int) -> Callable[[], None] | None:
    """What a rank does before it starts, so that it is killed when the launcher dies; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the kernel was asked
            os._exit(1)

    return ask


@contextlib.contextmanager
def _signals_passed_on(ranks: list[Rank]) -> Iterator[list[int]]:
    """Passes the first SIGINT or SIGTERM on to all ranks, a second one as SIGKILL; yields the list of those caught."""
    caught: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) == 1:
            _tell(ranks, number)
        else:
            _send(ranks, signal.SIGKILL)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[Rank], caught: list[int]) -> int:
    """Until all ranks have ended; ends the others when one fails. Returns the exit code of the whole."""
    failed = _first_failure(ranks)
    if failed is None:
        return 0
    is_user_error = failed.process.returncode == EXIT_USER_ERROR
    if is_user_error and failed.rank != 0:
        # Most such errors are met by every rank, and rank 0 says them best.
        _wait_for(ranks[:1], SECONDS_FOR_RANK_0_TO_SPEAK)
        if ranks[0].process.returncode == EXIT_USER_ERROR:
            failed = ranks[0]
    if not caught:
        _send(ranks, signal.SIGTERM)
    _wait_for(ranks, SECONDS_TO_STOP)
    _send(ranks, signal.SIGKILL)
    code = failed.process.returncode
    if not caught and not (is_user_error and failed.rank == 0):
        print(f"grpo-mega: rank {failed.rank} {_ending(code)}; {failed.tail()}", file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _first_failure(ranks: list[Rank]) -> Rank | None:
    """The first rank that ends with an exit code other than 0; None once all have ended well."""
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


def _ending(code: int) -> str:
    return f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


def _tell(ranks: list[Rank], number: int) -> None:
    """Sends a signal to every rank that has not had one."""
    for rank in ranks:
        if not rank.is_told:
            rank.is_told = True
            _send([rank], number)


def _send(ranks: list[Rank], number: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(number)


def _kill_group(rank: Rank) -> None:
    """Kills what is left of a rank and of the processes it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, signal.SIGKILL)
