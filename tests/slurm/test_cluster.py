"""slurm/train_tiny.sh on a real Slurm cluster of this machine: TP2.PP2 over two nodes of two ranks.

Starting the ranks takes most of the time, so one job goes through all failures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.distributed.launch import num_cores
from tests.slurm.cluster import ROOT, Cluster, missing_programs, wait_for
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.waiting]

SECONDS = 600.0  # timeout of each wait
SECONDS_TO_NAME = 60.0  # from a failure to the line with node and rank, if each core has at most LOAD processes
LOAD = 4
STEPS = 24
SETTINGS = ["--set", f"steps={STEPS}", "--set", "log.samples_per_step=1000", "--set", "eval.interval=10"]
SGLANG_STEPS = 12


class Job:
    """A job in progress, seen from outside. Each wait for text starts in the log after the previous match."""

    def __init__(
        self, cluster: Cluster, run_dir: Path, model: Path, *settings: str, options: tuple[str, ...] = (), **more: str
    ) -> None:
        self.cluster, self.run_dir = cluster, run_dir
        self.output = run_dir.with_name(f"{run_dir.name}.out")
        exports = ["ALL", f"RUN_DIR={run_dir}", f"PYTHON={sys.executable}", *(f"{k}={v}" for k, v in more.items())]
        script = ["slurm/train_tiny.sh", str(model), "tests/slurm/prompts.jsonl", *settings]
        given = ["--parsable", f"--output={self.output}", f"--export={','.join(exports)}", *options]
        self.id = cluster.run("sbatch", *given, *script).strip()
        self._heard = 0  # number of log characters already matched

    def log(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def num_steps(self) -> int:
        return max([row["step"] for row in self.rows() if "seconds/step" in row], default=0)

    def wait_for(self, condition: Callable[[], object], seconds: float = SECONDS) -> None:
        wait_for(condition, seconds, self._state)

    def wait_for_text(self, text: str, seconds: float = SECONDS) -> None:
        self.wait_for(lambda: text in self.log()[self._heard :], seconds)
        self._heard = self.log().index(text, self._heard) + len(text)

    def wait_for_name(self, text: str) -> None:
        load = os.getloadavg()[0] / num_cores()
        self.wait_for_text(text, SECONDS_TO_NAME * max(1.0, load / LOAD))

    def wait_for_steps(self, more: int) -> None:
        wanted = self.num_steps() + more
        self.wait_for(lambda: self.num_steps() >= wanted)

    def wait_for_start(self, *changes: str) -> str:
        """Return the first line of the next start.

        Slurm waits two minutes between a requeue and the next start. The test waits only three seconds. With less, a
        node would take the new start's credential for the old one and refuse it.
        """
        self.wait_for(lambda: self.cluster.state_of(self.id).get("JobState") == "PENDING")
        self.cluster.run("scontrol", "update", f"JobId={self.id}", "StartTime=now+3", *changes)
        self.wait_for_text(": start ")
        self.wait_for(lambda: "\n" in self.log()[self._heard :])
        return self.log()[self._heard :].partition("\n")[0]

    def end(self) -> str:
        """Wait for the end of the job. Return its state."""
        self.wait_for(
            lambda: self.cluster.state_of(self.id).get("JobState") in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
        )
        return self.cluster.state_of(self.id)["JobState"]

    def rank_process(self, rank: int) -> int:
        found = self.cluster.processes(
            lambda line, environ: "grpo_mega.cli train" in line and environ.get("RANK") == str(rank)
        )
        return min(found)

    def _state(self) -> str:
        return f"{self.cluster.state_of(self.id)}\n{self.cluster.run('sinfo', '-N')}\n{self.log()}"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)}: tests/run.sh --with-system-packages installs them on Debian")
    with Cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tiny_random_model.py"), str(folder)], check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Run without failures, with grpo-mega's own launcher."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    settings = ["--set", f"model.path={model}", "--set", f"data.train={ROOT}/tests/slurm/prompts.jsonl", *SETTINGS]
    kills.finish(kills.start(ROOT / "slurm" / "tiny.yaml", run_dir, settings), run_dir)
    return run_dir


STEP = """#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output={folder}/out
RANKS_PER_NODE=1 GPUS_PER_NODE=0 CHECK_ALLREDUCE=0 RUN_DIR={folder}/run {settings}
source "$GRPO_MEGA_ROOT/slurm/job.sh"
settings model data
if [[ -n "$CHECK" ]]; then check_nodes && say passed; exit; fi
on_nodes "$(joined "${{NODES[@]}}")" -- bash -c 'env > {folder}/$SLURMD_NODENAME'
wait_for "$STEP_PID"
"""
# Ways to call sbatch: a command before it, its options, and more variables.
CALLS: dict[str, tuple[list[str], list[str], dict[str, str]]] = {
    "plain": ([], [], {}),
    "none": ([], ["--export=NONE"], {}),
    "one": ([], ["--export=ODD_NAME"], {"ODD_NAME": "1"}),
    "all and one": ([], ["--export=ALL,ODD_NAME=1"], {}),
    "variable of sbatch": ([], [], {"SBATCH_EXPORT": "NONE"}),
    "variable of srun": ([], [], {"SLURM_EXPORT_ENV": "NONE"}),
    "options of srun": ([], [], {"SLURM_CPUS_PER_TASK": "77", "SLURM_MEM_PER_NODE": "7777777", "SLURM_NTASKS": "7"}),
    "leftovers": ([], [], {"SLURM_RESTART_COUNT": "5", "SLURM_NTASKS_PER_NODE": "7", "SLURM_OVERLAP": "1"}),
    "exclusive": ([], ["--exclusive"], {}),
    "allocation": (["salloc", "--nodes=1", "--nodelist=n2", f"--cpus-per-task={min(2, num_cores())}"], [], {}),
}


def submit(cluster: Cluster, folder: Path, call: str, **settings: str) -> dict[str, str]:
    """Run STEP on nodes n0 and n1. Return the fields of the job at its end."""
    folder.mkdir()
    before, options, more = CALLS[call]
    script = folder / "job.sh"
    values = {"GRPO_MEGA_ROOT": str(ROOT), "PYTHON": sys.executable, "CHECK": ""} | settings
    script.write_text(
        STEP.format(folder=folder, settings=" ".join(f"{name}={value}" for name, value in values.items()))
    )
    command = [*before, "sbatch", "--parsable", "--nodelist=n0,n1", *options, str(script)]
    done = subprocess.run(command, env=cluster.environ | more, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    is_over = ("COMPLETED", "FAILED", "PENDING")  # a requeued job is pending
    wait_for(lambda: (folder / "out").exists() and cluster.state_of(job).get("JobState") in is_over, SECONDS)
    cluster.run("scancel", job, check=False)
    return cluster.state_of(job)


def test_steps_have_the_same_variables_however_sbatch_is_called(cluster: Cluster, tmp_path: Path) -> None:
    names = {}
    for call in CALLS:
        folder = tmp_path / call.replace(" ", "_")
        state, out = submit(cluster, folder, call), (folder / "out").read_text()
        assert state["JobState"] == "COMPLETED", (call, out)
        environs = [dict(re.findall("^(\\w+)=(.*)", (folder / n).read_text(), re.MULTILINE)) for n in ("n0", "n1")]
        assert all(environ["START"].endswith(".0") and environ["PATH"] for environ in environs), call
        found = {frozenset(name for name in environ if name.startswith("SLURM")) for environ in environs}
        if call == "exclusive":
            assert [environ["SLURM_CPUS_ON_NODE"] for environ in environs] == [str(num_cores())] * 2, environs
        names[call] = found | {
            frozenset(environ.keys() & {"GRPO_MEGA_RUN_KEY", "PATH", "STATE"}) for environ in environs
        }
    assert all(found == names["plain"] for found in names.values()), names


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"CHECK_DISKS": "/missing/%n:1"}, "the same is wrong on all nodes, so no node is to blame"),
        ({"PYTHON": "/missing/python"}, "not requeued: the check of the nodes failed, and no node is to blame"),
    ],
    ids=["disks", "python"],
)
def test_a_check_that_fails_on_all_nodes_blames_none_and_stops(
    settings: dict[str, str], said: str, cluster: Cluster, tmp_path: Path
) -> None:
    state = submit(cluster, tmp_path / "job", "plain", CHECK="1", **settings)
    out = (tmp_path / "job" / "out").read_text()
    assert (state["JobState"], state["Restarts"], state["ExcNodeList"]) == ("FAILED", "0", "(null)"), out
    assert said in out and "not requeued" in out.splitlines()[-1], out
    assert not (tmp_path / "job" / "run").exists()


@pytest.mark.full
def test_a_job_with_all_failures_ends_like_a_job_without_failures(
    cluster: Cluster, model: Path, whole_run: Path, tmp_path: Path
) -> None:
    disks = tmp_path / "disks"
    for node in ("n0", "n2"):  # the disk of n1 is missing
        (disks / node).mkdir(parents=True)
    job = Job(
        cluster,
        tmp_path / "run",
        model,
        *SETTINGS,
        CHECK_DISKS=f"{disks}/%n:0.001",
        CHECK_ALLREDUCE="0",
        NODE_SILENCE_SECONDS="20",  # with less, a busy node may count as lost
    )

    job.wait_for_text(f"node n1: {disks}/n1: No such file or directory")
    job.wait_for_text("nodes excluded from now on: n1")
    assert job.wait_for_start().startswith("2: 2 nodes (n[0,2]) of 2 ranks")

    job.wait_for_steps(2)
    cluster.run("scancel", "--signal=USR1", job.id)  # the signal goes to all steps and would kill torchrun
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)
    job.wait_for_text("requeued: stopped at step-")
    assert job.log().count(" as requested; continue with the same command and --resume") == 1
    job.wait_for_start()

    job.wait_for_steps(2)
    os.kill(job.rank_process(3), 9)
    job.wait_for_name("first failure: node n2: rank 3 was killed by SIGKILL; ")
    job.wait_for_text("requeued: the last checkpoint is step-")
    job.wait_for_start()

    job.wait_for_steps(2)
    cluster.lose_node("n2")
    job.wait_for_name("node n2 (ranks 2-3) does not answer")
    job.wait_for_text("requeued: the last checkpoint is step-")
    # n2 stays lost, and n1 has been repaired. If n2 came back at once, Slurm would end the lost step on it. The next
    # start's step has the same number and would end, too.
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost")
    (disks / "n1").mkdir()
    assert ": 2 nodes (n[0-1]) of 2 ranks" in job.wait_for_start("ExcNodeList=")

    assert job.end() == "COMPLETED"
    assert f"finished: {job.run_dir}/hf" in job.log()
    assert kills.read_end(job.run_dir) == kills.read_end(whole_run)
    assert {path.name for path in (job.run_dir / "logs").glob("rank_*.log")} == {
        "rank_1.log",
        "rank_2.log",
        "rank_3.log",
    }


@pytest.mark.full
@pytest.mark.sglang
def test_a_job_with_servers_continues_with_the_same_prompts_when_requeued(
    cluster: Cluster, model: Path, whole_run: Path, tmp_path: Path
) -> None:
    settings = ["--set", "rollout.engine=sglang", "--set", "rollout.tp=2", "--set", f"steps={SGLANG_STEPS}"]
    settings += ["--set", "log.samples_per_step=1000", "--set", "data.heldout_size=2"]
    # The time limit ends 25 s after the start, when the script already watches it, and long before the last step.
    job = Job(cluster, tmp_path / "run", model, *settings, options=("--time=10",), LEAD_SECONDS="575", CHECK_NODES="0")
    job.wait_for_text("requeued: stopped at step-")
    cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    job.wait_for_start()
    assert job.end() == "COMPLETED"
    assert len(list(job.run_dir.glob("engines/*/server.log"))) == 2
    assert _counts(job.run_dir) == [counts for counts in _counts(whole_run) if counts["step"] <= SGLANG_STEPS]
    assert _optimizer_step(job.run_dir) == 2 * SGLANG_STEPS


def test_a_wrong_config_is_reported_once_and_leaves_nothing(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path / "run", model, "--set", "layout.tp=4", CHECK_NODES="0")
    assert job.end() == "FAILED"
    assert "error: WORLD_SIZE=4 contradicts layout.tp=4, pp=2, dp=1; " in job.log()
    assert job.log().count("not requeued: fix the config first") == 1
    assert not job.run_dir.exists()


def test_a_network_that_is_slow_everywhere_ends_the_job(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path / "run", model, NETWORK_FLOOR_GBPS="1e6")
    assert job.end() == "FAILED"
    assert (
        "not requeued: 2 of 2 nodes are below the floor, so no node is to blame: all-reduce within nodes " in job.log()
    )
    assert "excluded" not in job.log() and not job.run_dir.exists()


def _counts(run_dir: Path) -> list[dict[str, Any]]:
    """Return per step the (prompt, index, policy version) of its samples."""
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    steps = sorted({row["step"] for row in rows})
    return [
        {
            "step": step,
            "samples": sorted(
                (row["prompt_id"], row["index"], row["policy_version"]) for row in rows if row["step"] == step
            ),
        }
        for step in steps
    ]


def _optimizer_step(run_dir: Path) -> int:
    checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    return json.loads((checkpoint / "checkpoint.json").read_text())["optimizer_step"]
