"""Hostile programs in the sandbox: all end, no process is left, none reaches the network or a file outside.

Without --all a sample of the 200 programs runs.
"""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mega.processes import descendants
from grpo_mega.rewards.code import Program, missing_sandbox, run_programs
from tests.helpers.hostile_programs import programs

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

ALL = dict(programs(0, ""))
NUM_PARTS = 8
TIMEOUT_S = 1.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Yield a socket of the host that notices every connection and every packet to it."""
    with socket.socket() as tcp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        tcp.setblocking(False)
        yield tcp


def test_there_are_200_programs() -> None:
    assert len(ALL) >= 200


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.full) for number in range(1, NUM_PARTS))]
)
def test_hostile_programs_end_alone_and_reach_nothing(number: int, listener: socket.socket, tmp_path: Path) -> None:
    if missing_sandbox() is not None:
        pytest.skip(f"no namespaces: {missing_sandbox()}")
    tmp_path.chmod(0o777)
    port = listener.getsockname()[1]
    chosen = dict(programs(port, str(tmp_path)))
    names = sorted(chosen)[number::NUM_PARTS]
    before = set(descendants(os.getpid()))
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(type=socket.SOCK_DGRAM) as packets:
        abstract.bind(f"\0grpo-mega-{port}")
        abstract.listen()
        packets.bind(("127.0.0.1", port))
        runs = run_programs([Program(chosen[name]) for name in names], TIMEOUT_S)
        for one in (listener, abstract):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.accept()
        packets.setblocking(False)
        with pytest.raises(BlockingIOError):
            packets.recv(1)
    assert len(runs) == len(names)
    for name, run in zip(names, runs, strict=True):
        expected = {"loops": "timeout", "sleeps": "timeout", "ignores signals": "timeout"}.get(name.partition(", ")[2])
        assert expected is None or run.verdict in (expected, "output", "memory", "refused", "error"), (name, run)
        assert run.verdict != "finished" or name.endswith((", ends", ", exits")), (name, run)
    assert not list(tmp_path.iterdir())
    assert not list(Path("/").glob("*/escaped"))
    _wait_for_end_of_new(before)


def _wait_for_end_of_new(before: set[int]) -> None:
    end = time.monotonic() + 60
    while (left := set(descendants(os.getpid())) - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def test_a_program_has_a_read_only_root_and_no_rights() -> None:
    if missing_sandbox() is not None:
        pytest.skip(f"no namespaces: {missing_sandbox()}")
    program = """
import ctypes, os
print([bool(os.statvfs(path).f_flag & os.ST_RDONLY) for path in ("/", "/usr", ".")])
header, found = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
ctypes.CDLL(None).capget(header, found)
print(list(found), os.getuid(), os.getgid(), os.getgroups() in ([], [65534]), os.listdir("."))
print(sorted(os.environ), ctypes.CDLL(None).unshare(0x10000000))
"""
    (run,) = run_programs([Program(program)], 60)
    assert run.output.splitlines() == [
        "[True, True, False]",
        "[0, 0, 0, 0, 0, 0] 65534 65534 True []",
        "['LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH'] -1",
    ], run


def test_a_program_does_not_find_the_files_of_an_earlier_one() -> None:
    count = "import os; print(os.listdir('.')); print(len(os.environ))\n"
    runs = run_programs([Program("open('left', 'w').write('x')"), Program(count)], 30)
    assert runs[1].output.splitlines()[0] == "[]"


@pytest.mark.full
def test_without_namespaces_programs_still_end_within_their_limits() -> None:
    names = ("forks in a new session, loops", "daemonizes, sleeps", "starts a shell, loops")
    before = set(descendants(os.getpid()))
    runs = run_programs([Program(ALL[name]) for name in names], TIMEOUT_S, isolates=False)
    assert [run.verdict for run in runs] == ["timeout", "timeout", "timeout"]
    # A busy machine needs some time to fill the output.
    (flood,) = run_programs([Program(ALL["floods the errors, loops"])], 10 * TIMEOUT_S, isolates=False)
    assert flood.verdict == "output"
    _wait_for_end_of_new(before)
