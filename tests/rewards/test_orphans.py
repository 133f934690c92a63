"""No process of a pool outlives the pool, the pool's process, or the check that started it, even if the check hangs.

The tests recognize processes by a mark in their environment. Child processes inherit it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.pool, pytest.mark.waiting]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HANG = "user_functions.hang"
HANGS = ("in a regular expression", "in a loop", "deaf to signals", "on a fork", "on a new session", "on a daemon")
SERVERS = 3  # the rank, the process that forks the workers, and multiprocessing's resource tracker
NUM_PROCESSES = SERVERS + len(HANGS) + 3  # with the workers and a child of each of the last three
REFUSED = "import ctypes\nctypes.CDLL = lambda *_, **__: type('C', (), {'prctl': lambda *_: -1})\n"

RANK = """
import sys, time
from grpo_mega.config.data import RewardsConfig
from grpo_mega.rewards import RewardPool
hangs = sys.argv[3:]
functions = [{"name": "user_functions.hang"}]
with RewardPool(RewardsConfig(functions=functions, num_workers=len(hangs), deadline_s=float(sys.argv[2]))) as pool:
    for key, how in enumerate(hangs):
        pool.submit(key, "", how, "", {})
    exec(sys.argv[1])
"""


class Rank:
    """A process with a pool. All its workers hang."""

    def __init__(self, code: str, *hangs: str, deadline_s: float = 600, path: tuple[Path, ...] = ()) -> None:
        self._mark = f"GRPO_MEGA_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        folders = os.pathsep.join(map(str, (*path, ROOT, HERE)))
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, code, str(deadline_s), *hangs],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, name: value, "PYTHONPATH": folders},
            # Background processes of a shell and their children ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def living(self) -> list[int]:
        """Return the ids of the rank's process and all its descendants, without zombies."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_ours = self._mark.encode() in (folder / "environ").read_bytes().split(b"\0")
                if is_ours and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(folder.name))
        return found

    def has(self, number: int, within_s: float = 20.0) -> bool:
        """Return whether two consecutive looks find this number of processes."""
        until, seen = time.monotonic() + within_s, [-1, -1]
        while seen != [number] * 2 and time.monotonic() < until:
            time.sleep(0.1)
            seen = [seen[1], len(self.living())]
        return seen == [number] * 2

    def end(self) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def rank(code: str, *hangs: str, deadline_s: float = 600, path: tuple[Path, ...] = ()) -> Iterator[Rank]:
    started = Rank(code, *hangs, deadline_s=deadline_s, path=path)
    try:
        yield started
    finally:
        started.end()


def test_hanging_checks_and_their_children_end_with_a_killed_rank() -> None:
    with rank("time.sleep(600)", *HANGS) as hung:
        assert hung.has(NUM_PROCESSES), hung.living()
        hung.process.kill()
        assert hung.has(0, within_s=10), hung.living()


def test_hanging_checks_end_with_a_killed_rank_even_without_prctl(tmp_path: Path) -> None:
    """In some containers every call of prctl fails. There a daemon cannot be found."""
    (tmp_path / "sitecustomize.py").write_text(REFUSED)
    with rank("time.sleep(600)", *HANGS[:-1], path=(tmp_path,)) as hung:
        assert hung.has(NUM_PROCESSES - 2), hung.living()
        hung.process.kill()
        assert hung.has(0, within_s=10), hung.living()


def test_the_children_of_checks_end_when_the_pool_is_closed() -> None:
    with rank("time.sleep(600)", *HANGS) as hung:
        assert hung.has(NUM_PROCESSES), hung.living()
        hung.process.send_signal(signal.SIGINT)
        assert hung.process.wait(60) != 0
        assert hung.has(0, within_s=10), hung.living()


def test_the_children_of_a_check_end_when_it_exceeds_its_deadline() -> None:
    code = "pool.collect(); print(pool.counters['killed_workers'], flush=True); time.sleep(600)"
    hangs = ("on a fork", "on a new session")
    with rank(code, *hangs, deadline_s=1.0) as hung:
        assert hung.process.stdout and hung.process.stdout.readline() == "2\n"
        assert hung.has(SERVERS + len(hangs), within_s=5), hung.living()  # new workers are idle
