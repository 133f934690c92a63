"""A stuck run ends, and reports the collectives in which its ranks wait. Each rank here is a process on gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.distributed.watchdog import EXIT_HANG, _ranks

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import os, signal, sys, time
from datetime import timedelta
from grpo_mega.distributed.watchdog import recorder
recorder()
import torch, torch.distributed as dist
from grpo_mega.trainer import saving
from grpo_mega.trainer.saving import Checkpoints
from grpo_mega.config import CheckpointConfig
from grpo_mega.distributed.watchdog import HangWatch
from grpo_mega.tracking.progress import Timers
from pathlib import Path
from types import SimpleNamespace
from tests.helpers.slow_policy import SlowPolicy, manifest
folder, behaviour = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
store = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())
timers = Timers()

def lost_in_thought():
    (folder / "lost").touch()
    time.sleep(60)

saving._CHUNK = 1000
checkpoints = Checkpoints(folder, CheckpointConfig().keep, rank, store, print)
slow = SlowPolicy(rank, num_parts=8 if behaviour == "well" else 1000, pause_s=0.8 if rank == 2 else 0.0)
dist.barrier()
with HangWatch(folder, 3.0, {"sample": 9.0}, store, rank, 4, timers, lambda: "the last good one is step-7"):
    with timers("sample"):
        time.sleep(5)  # longer than the deadline of other phases
    for _ in range(40):  # also longer than the deadline, but there is progress
        dist.all_reduce(torch.zeros(8))
        time.sleep(0.1)
    checkpoints.save(slow, manifest(3))  # rank 2 writes for longer than the deadline; waiting for it is allowed
    if behaviour == "well":
        with timers("checkpoint"):
            checkpoints.finish()
    with timers("update"):  # a slow write must not hide a hang
        if rank == 2 and behaviour == "lost":
            lost_in_thought()
        if rank == 2 and behaviour == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(torch.zeros(1024))
dist.barrier()
"""


def run(folder: Path, behaviour: str) -> tuple[int, str]:
    code = "import sys; from pathlib import Path; from grpo_mega.distributed.launch import run_ranks; "
    code += "sys.exit(run_ranks([sys.executable, *sys.argv[2:]], 4, Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(folder / "logs"), "-c", RANK, str(folder), behaviour]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    return result.returncode, result.stderr


@pytest.mark.distributed
@pytest.mark.waiting
def test_a_missing_rank_is_named_with_its_location_and_stacks_are_saved(tmp_path: Path) -> None:
    code, said = run(tmp_path, "lost")
    assert code == EXIT_HANG, said
    assert (tmp_path / "hang" / "report.txt").stat().st_mtime - (tmp_path / "lost").stat().st_mtime < 30
    assert re.search(r"no progress for \d+ s in update, reported by rank 0; the run ends here", said)
    assert re.search(r"rank 2: update, after barrier over all ranks, at <string>:\d+ lost_in_thought", said)
    assert re.search(r"ranks 0-1, 3: update, in all_reduce of 1024 float32 over all ranks, at", said), said
    assert "is step-7" in said
    assert said.index("rank 2:") < said.index("ranks 0-1, 3:")  # the rarest answer comes first
    assert "lost_in_thought" in (tmp_path / "hang" / "rank_2.txt").read_text()
    assert len(list((tmp_path / "hang").glob("rank_*.txt"))) == 4
    assert (tmp_path / "hang" / "report.txt").read_text().strip() in said


@pytest.mark.distributed
@pytest.mark.waiting
def test_a_rank_that_cannot_answer_is_named(tmp_path: Path) -> None:
    code, said = run(tmp_path, "stopped")
    assert code == EXIT_HANG and re.search(r"(no progress|no heartbeat from rank 2) for \d+ s", said), said
    assert "rank 2: no answer" in said
    assert "ranks 0-1, 3: update, in all_reduce" in said


@pytest.mark.distributed
@pytest.mark.waiting
def test_a_run_that_makes_progress_is_left_alone(tmp_path: Path) -> None:
    code, said = run(tmp_path, "well")
    assert (code, "no progress" in said) == (0, False), said
    assert not (tmp_path / "hang").exists()
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000003\n"


STUCK = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
from grpo_mega.distributed.watchdog import HangWatch
from grpo_mega.tracking.progress import Timers

store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))

def last_checkpoint():
    raise OSError("Stale file handle")

timers = Timers()
with HangWatch(Path(sys.argv[1]), 1.0, {}, store, 0, 1, timers, last_checkpoint), timers("update"):
    time.sleep(600)
"""


def stuck(run_dir: Path, stderr: Path) -> int:
    with stderr.open("w") as file:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", STUCK, str(run_dir)], stderr=file, env=environment, timeout=120
        ).returncode


def test_a_stuck_run_ends_though_its_folder_and_terminal_are_full(full_disk: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert stuck(full_disk, said) == EXIT_HANG
    assert re.search(r"no progress for \d+ s in update, reported by rank 0; the run ends here", said.read_text())
    assert "stacks cannot be written" in said.read_text() and "No space left" in said.read_text()
    assert "(Stale file handle)" in said.read_text()
    assert stuck(full_disk, Path("/dev/full")) == EXIT_HANG


def test_a_stuck_run_ends_though_its_folder_is_gone_or_never_answers(tmp_path: Path) -> None:
    said = tmp_path / "said"
    (tmp_path / "file").touch()
    assert stuck(tmp_path / "file", said) == EXIT_HANG
    assert "stacks cannot be written" in said.read_text() and "Not a directory" in said.read_text()
    (tmp_path / "run" / "hang").mkdir(parents=True)
    for name in ("rank_0.txt", "report.txt"):
        os.mkfifo(tmp_path / "run" / "hang" / name)  # no reader, so opening it blocks forever
    assert stuck(tmp_path / "run", said) == EXIT_HANG
    assert "stacks cannot be written" in said.read_text() and "in 5 s" in said.read_text()


@pytest.mark.parametrize(
    ("numbers", "text"), [([4], "rank 4"), ([0, 1, 2, 3, 5], "ranks 0-3, 5"), ([1, 3, 4], "ranks 1, 3-4")]
)
def test_ranks_are_named_by_runs(numbers: list[int], text: str) -> None:
    assert _ranks(numbers) == text


def test_nodes_are_named_if_there_are_several() -> None:
    assert _ranks([2, 3], ["n0", "n0", "n1", "n1"]) == "ranks 2-3 on n1"
    assert _ranks([1, 2], ["n0", "n0", "n1", "n1"]) == "ranks 1-2 on n0, n1"
    assert _ranks([1, 2], ["n0", "n0", "n0"]) == "ranks 1-2"
