"""Training survives servers that are killed or hang: no sample is lost or duplicated, and no process or file is left
over.

Runs have two replicas of one rank each. Starts and restarts take most of the time, so each run covers many failures.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.servers import Tree, is_true_within
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.sglang, pytest.mark.waiting]

SECONDS = 300  # timeout of each wait
CONFIG = {
    "steps": 1000,  # the tests stop the runs
    "layout": {"dp": 2},
    "rollout": {"engine": "sglang", "max_response_length": 32, "max_restarts": 9, "stall_deadline_s": 15},
    "batch": {"prompts_per_step": 8, "mini_batches": 2, "tokens_per_micro_batch": 256},
    "log": {"progress": False, "samples_per_step": 1000},
    "checkpoint": {"interval": 0},
    "eval": {"interval": 0},
}


class Run:
    """A run in progress, seen from outside: its files and its processes."""

    def __init__(self, config: Path, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.log_start = len(self.log())
        self.process = kills.start(config, folder, list(arguments))

    def log(self) -> str:
        return _read(kills.log_of(self.folder))[getattr(self, "log_start", 0) :]

    def steps(self) -> list[dict[str, float]]:
        lines = _read(self.folder / "metrics.jsonl").split("\n")[:-1]
        return [row for row in map(json.loads, lines) if "seconds/step" in row]

    def restarts(self) -> list[str]:
        return re.findall(r"the engine of rank \d+ failed and is restarted.*", self.log())

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < until, self.log()
            time.sleep(0.01)

    def wait_for_steps(self, more: int) -> None:
        wanted = len(self.steps()) + more
        self.wait_for(lambda: len(self.steps()) >= wanted)

    def wait_for_sync(self) -> None:
        """Wait until a server has loaded a part of a weight update, before the update is complete."""
        reports = self.last_report()
        self.wait_for(lambda: self.last_report() > reports)

    def last_report(self) -> int:
        """Return the time of the last report in a server's folder, the second argument of its guardian."""
        guardians = [pid for pid in Tree.below(self.process.pid).pids if _is_guardian(pid)]
        folders = [Path(re.findall(r"server_main \d+ (\S+)", _title(pid))[0]) for pid in guardians]
        return max((p.stat().st_mtime_ns for folder in folders for p in folder.glob("loader_0_*.json")), default=0)

    def servers(self) -> list[list[int]]:
        """Return the process ids of each server: its guardian, then SGLang's processes."""
        guardians = [pid for pid in Tree.below(self.process.pid).pids if _is_guardian(pid)]
        return [[pid, *Tree.below(pid).pids] for pid in sorted(guardians)]

    def end(self) -> str:
        """Wait for the end of the run. Return its log."""
        self.process.wait(timeout=SECONDS)
        return self.log()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = kills.write_inputs(tmp_path_factory.mktemp("inputs"), "dp=2")
    config = json.loads(path.read_text())
    for name, value in CONFIG.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gm", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def check_nothing_is_left(tree: Tree, temporary: Path) -> None:
    assert is_true_within(20, lambda: not tree.remains()), tree.remains()
    found = [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]  # ignore torch's cache
    assert found == []


@pytest.mark.full
def test_killed_and_hanging_servers_lose_and_duplicate_no_sample(config: Path, tmp_path: Path, temporary: Path) -> None:
    moments = random.Random(7)
    run = Run(config, tmp_path / "run")
    run.wait_for_steps(2)
    tree = Tree.below(run.process.pid)
    step_seconds = min(row["seconds/step"] for row in run.steps())

    def kill(servers: list[list[int]]) -> None:
        before = len(run.restarts())
        for server in servers:
            os.kill(moments.choice(server), signal.SIGKILL)
            time.sleep(moments.random() * step_seconds if len(servers) > 1 else 0)
        run.wait_for(lambda: len(run.restarts()) >= before + len(servers))
        run.wait_for_steps(1)

    time.sleep(moments.random() * step_seconds)
    kill(run.servers()[:1])
    time.sleep(moments.random() * step_seconds)
    kill(run.servers())
    run.wait_for_sync()
    kill(run.servers()[1:])
    time.sleep(moments.random() * step_seconds)
    kill(run.servers()[1:])
    assert len(run.restarts()) == 5

    (scheduler,) = [pid for pid in run.servers()[0] if _title(pid).startswith("sglang::scheduler")]
    os.kill(scheduler, signal.SIGSTOP)
    run.wait_for(lambda: len(run.restarts()) == 6)
    assert re.search(r"hangs|gave no answer for", run.restarts()[-1])
    run.wait_for_steps(2)
    assert all(len(server) == 4 for server in run.servers())
    (tmp_path / "run" / "stop").touch()
    log = run.end()
    assert run.process.returncode == 0, log

    last = len(run.steps())
    assert [row["step"] for row in run.steps()] == list(range(1, last + 1))
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    everything = {(step, prompt, index) for step in range(1, last + 1) for prompt in range(8) for index in range(4)}
    assert len(samples) == len(everything)
    assert {(sample["step"], sample["prompt_id"], sample["index"]) for sample in samples} == everything
    assert all(sample["policy_version"] == sample["step"] - 1 for sample in samples)
    assert max(row["mismatch/abs_max"] for row in run.steps()) < 1e-5
    check_nothing_is_left(tree, temporary)


@pytest.mark.full
def test_a_server_without_restarts_left_ends_the_run_with_a_checkpoint(
    config: Path, tmp_path: Path, temporary: Path
) -> None:
    """Partial rollouts: unfinished samples are in the checkpoint, and no sample is trained twice."""
    stragglers = ("--set", "batch.prompts_per_step=4", "--set", "rollout.oversample=2", "--set", "rollout.partial=true")
    run = Run(config, tmp_path / "run", *stragglers, "--set", "rollout.max_restarts=0")
    run.wait_for_steps(1)
    tree = Tree.below(run.process.pid)
    os.kill(run.servers()[1][0], signal.SIGKILL)
    log = run.end()
    assert run.process.returncode == 2, log
    (line,) = [line for line in log.splitlines() if "error:" in line]
    assert re.search(
        r"the engine of rank [01] failed 1 times \(http://127\.0\.0\.1:\d+ .*; remove the cause, or raise "
        r"rollout\.max_restarts, and continue with --resume; a checkpoint of step \d+ is in .*/checkpoints$",
        line,
    )
    assert "Traceback" not in log
    last = len(run.steps())
    check_nothing_is_left(tree, temporary)

    resumed = Run(config, tmp_path / "run", *stragglers, "--resume")
    resumed.wait_for_steps(1)
    assert [row["ledger/trained_groups"] for row in resumed.steps()] == [4.0 * row["step"] for row in resumed.steps()]
    begun_ahead = [row["ledger/begun_groups"] - row["ledger/trained_groups"] for row in resumed.steps()]
    assert min(begun_ahead) >= 0 < max(begun_ahead)  # 0 if enough groups finished before others started
    assert max(row.get("mismatch/k3_stale_0", 0.0) for row in resumed.steps()) < 1e-9
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    begun_by = [sample["spans"][0][0] if "spans" in sample else sample["policy_version"] for sample in samples]
    assert all(
        sample["step"] - 3 <= version < sample["step"] for sample, version in zip(samples, begun_by, strict=True)
    )
    assert len({(s["prompt_id"], s["index"], version) for s, version in zip(samples, begun_by, strict=True)}) == len(
        samples
    )
    assert resumed.steps()[last]["step"] == last + 1
    tree = Tree.below(resumed.process.pid)
    resumed.process.send_signal(signal.SIGINT)
    log = resumed.end()
    assert resumed.process.returncode == 0, log
    assert f"resumed after step {last} from" in log and "continue with the same command and --resume" in log
    check_nothing_is_left(tree, temporary)


@pytest.mark.full
def test_a_server_on_an_engine_rank_may_be_killed_in_a_phase_and_in_a_sync(
    config: Path, tmp_path: Path, temporary: Path
) -> None:
    given = {"layout.dp": 1, "layout.engine_ranks": 1, "rollout.placement": "separate", "rollout.max_staleness": 1}
    given |= {
        "batch.prompts_per_step": 4,
        "batch.mini_batches": 1,
        "rollout.max_restarts": 2,
        "algorithm.recipe": "partial",
    }
    run = Run(config, tmp_path / "run", *(part for item in given.items() for part in ("--set", "{}={}".format(*item))))
    run.wait_for_steps(2)
    tree = Tree.below(run.process.pid)
    for wait in (lambda: run.wait_for_steps(1), run.wait_for_sync):
        before = len(run.restarts())
        wait()
        os.kill(run.servers()[0][-1], signal.SIGKILL)
        run.wait_for(lambda: len(run.restarts()) > before)  # noqa: B023
        run.wait_for_steps(2)
    os.kill(run.servers()[0][-1], signal.SIGKILL)
    log = run.end()
    assert run.process.returncode == 2, log
    (line,) = [line for line in log.splitlines() if "error:" in line]
    assert re.search(r"the engine of rank 1 failed 3 times .*; a checkpoint of step \d+ is in .*/checkpoints$", line)
    check_nothing_is_left(tree, temporary)
    last = len(run.steps())
    assert [row["step"] for row in run.steps()] == list(range(1, last + 1))
    assert [row["ledger/trained_groups"] for row in run.steps()] == [4.0 * n for n in range(1, last + 1)]
    assert max(row["staleness/max"] for row in run.steps()) <= 1
    assert max(row.get("mismatch/k3_stale_0", 0.0) for row in run.steps()) < 1e-9


@pytest.mark.full
def test_ctrl_c_while_the_servers_start_leaves_nothing(config: Path, tmp_path: Path, temporary: Path) -> None:
    run = Run(config, tmp_path / "run")
    run.wait_for(lambda: len(run.servers()) == 2)
    tree = Tree.below(run.process.pid)
    run.process.send_signal(signal.SIGINT)
    log = run.end()
    # On a slow machine the servers may already be up. Then the run ends like a stopped run.
    assert run.process.returncode != 0 or "continue with the same command and --resume" in log, log
    check_nothing_is_left(tree, temporary)


def _is_guardian(pid: int) -> bool:
    parent = (
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] if Path(f"/proc/{pid}").exists() else "1"
    )
    return "sglang.server_main" in _title(pid) and "sglang.server_main" not in _title(int(parent))


def _title(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
