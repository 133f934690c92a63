"""The Slurm scripts: their text, early refusals, staging of models, and the YAML files checked by the planner."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.cli.checks.model import KNOWN_MODELS
from grpo_mega.cli.commands.options import PlanOptions
from grpo_mega.cli.commands.plan import prepare_plan as plan_setup
from grpo_mega.cli.planner.plan import MARGIN, Plan
from grpo_mega.config import load
from tests.helpers.shapes import LLAMA_70B, QWEN_72B
from tests.slurm.cluster import wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sh"))
HEADS = [path for path in SCRIPTS if path.name.startswith("train_")]
CONFIGS = sorted((ROOT / "slurm").glob("*.yaml"))
MODELS = {  # config.json and number of GPUs per config
    "llama3_70b": (LLAMA_70B, 64),
    "llama3_70b_bf16": (LLAMA_70B, 64),
    "llama3_70b_lora": (LLAMA_70B, 8),
    "llama3_70b_32k": (KNOWN_MODELS["llama-3.1-70b"].fields, 64),
    "qwen2.5_72b": (QWEN_72B, 64),
    "llama3_405b": (KNOWN_MODELS["llama-3.1-405b"].fields, 512),
    "qwen3_30b_a3b": (KNOWN_MODELS["qwen3-30b-a3b"].fields, 8),
    "qwen3_235b_a22b": (KNOWN_MODELS["qwen3-235b-a22b"].fields, 256),
}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_every_script(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck: tests/run.sh --with-system-packages installs it on Debian")
    result = subprocess.run(
        ["shellcheck", "--external-sources", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.name)
@pytest.mark.parametrize("arguments", [[], ["model"], ["model", "--set"]], ids=str)
def test_missing_arguments_are_refused_in_one_line(path: Path, arguments: list[str]) -> None:
    code, said = _bash(path, arguments)
    assert code == 2 and said.startswith("usage: sbatch slurm/train_") and said.count("\n") == 1, said


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.name)
def test_a_wrong_folder_and_a_missing_slurm_are_reported(path: Path, tmp_path: Path) -> None:
    code, said = _bash(path, ["model", "data"])
    assert code == 2 and said.startswith("error: this is no Slurm job") and said.count("\n") == 1
    code, said = _bash(path, ["model", "data"], SLURM_SUBMIT_DIR=str(tmp_path))
    assert code == 2 and f"{tmp_path}/slurm/job.sh is not there; call sbatch in the repository" in said


def test_both_scripts_request_the_options_that_they_need() -> None:
    """Without these options a job would not be requeued, would lose its log, or every rank would get the signal."""
    for path in HEADS:
        asked = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH ")]
        for wanted in ("--requeue", "--open-mode=append", "--signal=B:USR1@", "--ntasks-per-node=1"):
            assert any(wanted in line for line in asked), (path.name, wanted)


def _requeue(state: Path) -> str:
    """Return the last message of a failed start that saved nothing."""
    code = 'source slurm/job.sh; say() { echo "$*"; }; requeue() { echo "requeued: $*"; exit 0; }; requeue_or_give_up'
    environment = os.environ | {"GRPO_MEGA_ROOT": str(ROOT), "STATE": str(state), "RUN_DIR": str(state / "none")}
    return subprocess.run(["bash", "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True).stdout


def test_failed_starts_that_save_nothing_are_counted_and_end(tmp_path: Path) -> None:
    assert _requeue(tmp_path / "state") == "requeued: the last checkpoint is none\n"
    assert _requeue(tmp_path / "state").startswith("given up after 2 starts in a row that saved nothing; ")
    for damaged in ("", "many", "1\n1", "0x", "08"):
        (tmp_path / "state" / "starts_without_save").write_text(damaged)
        assert _requeue(tmp_path / "state").startswith("given up after "), damaged


def test_failed_starts_that_cannot_be_counted_are_not_repeated(full_disk: Path) -> None:
    for state in (full_disk, full_disk / "filler" / "state"):
        for _ in range(2):
            assert _requeue(state).startswith(
                f"given up: {state}/starts_without_save cannot be written; free its disk, "
            )


def _watched(state: Path) -> str:
    """Return the output of a node's watch when it ends. The node itself would never end."""
    code = "import sys, time; sys.path[:0] = ['slurm', '.']; import node, threading; watched = node.Node()\n"
    code += "threading.Thread(target=watched.watch, daemon=True).start(); time.sleep(600)"
    environment = {"SLURMD_NODENAME": "n0", "STATE": str(state), "START": "7.0", "NODE_SILENCE_SECONDS": "0.5"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    return result.stderr


def test_a_node_is_watched_even_if_its_beats_cannot_be_written(full_disk: Path, tmp_path: Path) -> None:
    assert "no beat from the job's script for 2 s" in _watched(full_disk)
    (tmp_path / "job_beat").write_bytes(b"\xff\xfe")
    assert "node n0: its watch ended with UnicodeDecodeError" in _watched(tmp_path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid_and_starts_with_its_requirements(path: Path) -> None:
    assert load(path).steps > 0
    header = "".join(itertools.takewhile(lambda line: line.startswith("#"), path.open()))
    assert "needs" in header.lower() and "expect" in header.lower()


@pytest.mark.parametrize("name", MODELS)
def test_a_large_model_fits_its_gpus_of_80_gb_with_room_to_spare(name: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    fields, num_gpus = MODELS[name]
    config.write_text(json.dumps(dict(fields)))
    path = ROOT / "slurm" / f"{name}.yaml"
    setup, violations = plan_setup(PlanOptions(path, gpu="h100", world_size=num_gpus, model_config=config))
    assert setup is not None and not violations.violations
    plan = Plan(setup)
    assert plan.fits and plan.spare >= MARGIN
    header = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
    assert f"{plan.peak_gib:.0f} of {plan.capacity_gib:.0f} GiB at the peak ({plan.spare:.0%} to spare)" in header


def test_the_lead_covers_a_step_and_a_save_that_is_read_back() -> None:
    code = "import prepare; print(prepare.lead_seconds(85, 988, 2), prepare.lead_seconds(1, 0.1, 2))"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "slurm", capture_output=True, text=True, check=True
    )
    assert printed.stdout.split() == [str(3 * 85 + 2 * 988 // 2 + 180), "600"]


@pytest.mark.parametrize(
    ("states", "answers", "code", "said"),
    [
        (["RUNNING"] * 5, [1] * 5, 1, "error: cannot be requeued; sbatch again with RUN_DIR=/run"),
        (["RUNNING", "PENDING"], [1, 1], 0, "left to Slurm, which has cancelled the job or requeues it"),
        ([""], [1, 0], 0, "requeued: after a failure"),  # the controller answers on the second try
    ],
    ids=["forbidden", "already_requeued", "no_answer_at_first"],
)
def test_a_requeue_that_slurm_refuses(
    states: list[str], answers: list[int], code: int, said: str, tmp_path: Path
) -> None:
    """Slurm may already have requeued a job that lost a node."""
    for name, lines in (("show", [state and f"JobState={state}" for state in states]), ("requeue", answers)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    script = f"""
        source "{ROOT}/slurm/job.sh"
        SLURM_JOB_NAME=tiny SLURM_JOB_ID=1 RUN_DIR=/run IS_TERMINATED="" BAD_NODES=""
        trap on_term TERM
        next() {{ head -n 1 "{tmp_path}/$1"; sed -i 1d "{tmp_path}/$1"; }}
        sleep() {{ [[ "$1" == 5 ]] || kill -TERM $$; }}
        scontrol() {{
            [[ "$1" == show ]] && next show && return
            return "$(next requeue)"
        }}
        requeue "after a failure"
    """
    environ = os.environ | {"GRPO_MEGA_ROOT": str(ROOT)}
    result = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert result.returncode == code and result.stdout.splitlines()[-1].endswith(f"tiny 1: {said}"), result
    assert not (tmp_path / "show").read_text() and not (tmp_path / "requeue").read_text(), "some calls are missing"


@pytest.mark.parametrize(
    ("field", "expected"),
    [("CPUs/Task=1", []), ("CPUs/Task=6", ["--cpus-per-task=6"]), ("CPUs/Task=N/A", []), ("", [])],
)
def test_only_a_job_that_asks_for_cores_limits_its_steps(field: str, expected: list[str]) -> None:
    """Slurm says 1 also for a job that asks for none, such as an exclusive one, whose steps need all cores."""
    script = f"""
        source "{ROOT}/slurm/job.sh"
        SLURM_JOB_ID=1 ROOT=/none RUN_DIR=/none MODEL=/none DATA=/none
        scontrol() {{ echo "NumNodes=1 NumCPUs=12 NumTasks=1 {field} Restarts=0"; }}
        srun() {{ printf '%s\\n' "$@"; }}
        keep_own_variables
        on_nodes n0,n1 -- true
        wait_for "$STEP_PID"
    """
    environ = os.environ | {"GRPO_MEGA_ROOT": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60, check=True)
    asked = done.stdout.splitlines()
    assert "--nodes=2" in asked, done
    assert [word for word in asked if word.startswith("--cpus-per-task")] == expected


def _bash(path: Path, arguments: list[str], **more: str) -> tuple[int, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"SLURM_SUBMIT_DIR": str(ROOT)} | more
    result = subprocess.run(["bash", str(path), *arguments], env=environ, capture_output=True, text=True)
    assert not result.stdout
    return result.returncode, result.stderr


def stage(source: Path, target: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "slurm" / "stage.sh"), str(source), str(target)]
    values = os.environ | {"SLURMD_NODENAME": "n3"} | environment
    return subprocess.run(command, capture_output=True, text=True, env=values, timeout=120)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = tmp_path / "model"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_text("weights")
    (source / "sub" / "b\n c").write_text("more")  # the name has a line break and a blank
    return source


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_copied_once_and_again_if_it_is_incomplete(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk" / "copy"
    assert stage(model, target).returncode == 0
    assert texts(target) == texts(model)
    first = (target / "a").stat().st_ino
    assert stage(model, target).returncode == 0 and (target / "a").stat().st_ino == first
    (target / "a").write_text("cut off")
    (target / "sub" / "b\n c").unlink()
    assert stage(model, target).returncode == 0 and texts(target) == texts(model)
    assert {path.name for path in target.parent.iterdir()} == {"copy", "copy.staged", "copy.lock"}


@pytest.mark.parametrize("changed", ["source", "copy"])
@pytest.mark.parametrize("keeps_time", [False, True])
def test_a_change_that_keeps_the_size_is_copied_again(
    changed: str, keeps_time: bool, model: Path, tmp_path: Path
) -> None:
    """Other weights of the same model have equal names and sizes. `rsync --times` and `cp -p` also keep the times."""
    target = tmp_path / "disk" / "copy"
    assert stage(model, target).returncode == 0
    path = (model if changed == "source" else target) / "a"
    before = path.stat()
    path.write_text("WEIGHTS")
    if keeps_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert stage(model, target).returncode == 0
    assert texts(target) == texts(model)


def test_a_full_check_detects_bytes_that_changed_silently(model: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk" / "copy"
    assert stage(model, target).returncode == 0
    (target / "a").write_text("WEIGHTS")
    record = target.with_name("copy.staged")
    shown = subprocess.run(
        [
            "bash",
            "-c",
            f"""source <(sed -n '/^digest()/,/^}}/p; /^looks()/,/^}}/p' {ROOT}/slurm/stage.sh); looks "{target}" """,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    record.write_text(f"{record.read_text().split()[0]} {shown.stdout.strip()}\n")  # simulates a failing disk
    assert stage(model, target).returncode == 0 and (target / "a").read_text() == "WEIGHTS", (
        "a quick check cannot detect it"
    )
    assert stage(model, target, STAGE_CHECK="full").returncode == 0 and texts(target) == texts(model)


SLOW_COPY = '#!/bin/sh\n/bin/cp "$@" || exit\necho copied >> {log}\nwhile [ -e {gate} ]; do sleep 0.05; done\n'


@pytest.fixture
def slow_copies(tmp_path: Path) -> tuple[dict[str, str], Path, Path]:
    """Return an environment whose `cp` copies, then waits until a gate file is gone; the gate; a log with a line per
    copy.
    """
    (tmp_path / "bin").mkdir()
    gate, log = tmp_path / "gate", tmp_path / "log"
    gate.touch()
    (tmp_path / "bin" / "cp").write_text(SLOW_COPY.format(log=log, gate=gate))
    (tmp_path / "bin" / "cp").chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}, gate, log


def start_staging(source: Path, target: Path, environment: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    command = ["bash", str(ROOT / "slurm" / "stage.sh"), str(source), str(target)]
    with output.open("wb") as file:
        return subprocess.Popen(command, env=os.environ | environment, stdout=file, stderr=file, process_group=0)


def test_jobs_that_share_a_node_copy_one_after_another(
    model: Path, tmp_path: Path, slow_copies: tuple[dict[str, str], Path, Path]
) -> None:
    (environment, gate, log), target = slow_copies, tmp_path / "disk" / "copy"
    first = start_staging(model, target, environment, tmp_path / "first")
    wait_for(log.exists, 60)
    others = [start_staging(model, target, environment, tmp_path / f"other-{i}") for i in range(3)]
    for i in range(3):
        wait_for(lambda i=i: "waiting for another job" in (tmp_path / f"other-{i}").read_text(), 60)  # type: ignore[misc]
    assert not target.exists(), "an unfinished copy is not visible"
    gate.unlink()
    assert [process.wait(60) for process in (first, *others)] == [0, 0, 0, 0]
    assert log.read_text() == "copied\n" and texts(target) == texts(model)


def test_a_killed_copy_does_not_count_as_complete_and_leaves_no_lock(
    model: Path, tmp_path: Path, slow_copies: tuple[dict[str, str], Path, Path]
) -> None:
    (environment, _, log), target = slow_copies, tmp_path / "disk" / "copy"
    killed = start_staging(model, target, environment, tmp_path / "output")
    wait_for(log.exists, 60)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not target.exists()
    assert stage(model, target).returncode == 0 and texts(target) == texts(model)
    target.with_name("copy.staged").unlink()  # simulates a kill between the last two steps
    (target / "a").unlink()
    assert stage(model, target).returncode == 0 and texts(target) == texts(model)


def test_a_model_that_changes_while_it_is_copied_is_refused(
    model: Path, tmp_path: Path, slow_copies: tuple[dict[str, str], Path, Path]
) -> None:
    (environment, gate, log), target = slow_copies, tmp_path / "disk" / "copy"
    process = start_staging(model, target, environment, tmp_path / "output")
    wait_for(log.exists, 60)
    (model / "a").write_text("WEIGHTS")
    gate.unlink()
    assert process.wait(60) == 1 and not target.exists()
    assert f"{model} changed while it was copied; start again" in (tmp_path / "output").read_text()


def test_a_disk_without_locks_uses_a_lock_elsewhere_on_the_node(model: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flock").write_text(
        '#!/bin/sh\ncase "$(readlink /proc/self/fd/9)" in\n'
        '    /dev/shm/*) exec /usr/bin/flock "$@" ;;\n    *) echo "flock: 9: No locks available" >&2; exit 1 ;;\nesac\n'
    )
    (tmp_path / "bin" / "flock").chmod(0o755)
    target = tmp_path / "disk" / "copy"
    result = stage(model, target, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    assert texts(target) == texts(model)
    for path in Path("/dev/shm").glob(f"grpo_mega-stage-{os.geteuid()}-*"):
        path.unlink()


MOUNTED = ["ROOT", "RUN_DIR", "MODEL", "DATA", "NODE_LOCAL"]


@pytest.mark.parametrize("name", MOUNTED)
@pytest.mark.parametrize("character", [":", ","])
def test_a_path_that_a_container_cannot_mount_is_refused(name: str, character: str, tmp_path: Path) -> None:
    odd = tmp_path / f"a{character}b"
    odd.mkdir()
    values = {one: str(tmp_path) for one in MOUNTED} | {name: str(odd)}
    code, said = check_mounts(values | {"CONTAINER": "image.sif"})
    assert (code, said.count("\n")) == (2, 1) and said.startswith(f"error: {name}={odd}: must have no"), said
    assert check_mounts(values) == (0, ""), "nothing is mounted without a container"
    assert check_mounts(values | {"CONTAINER": "image.sif", name: str(tmp_path)}) == (0, "")


def test_a_data_set_of_the_hub_is_not_mounted() -> None:
    values = dict.fromkeys(MOUNTED, "/x") | {"DATA": "hub:owner/name", "CONTAINER": "image.sif"}
    assert check_mounts(values) == (0, "")


def check_mounts(values: dict[str, str]) -> tuple[int, str]:
    script = f'source "{ROOT}/slurm/job.sh"; ROOT="$ROOT_GIVEN"; check_mounts'
    given = {name: value for name, value in values.items() if name != "ROOT"} | {"ROOT_GIVEN": values["ROOT"]}
    environ = os.environ | {"GRPO_MEGA_ROOT": str(ROOT)} | given
    result = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stderr


def test_a_hub_snapshot_of_links_is_copied_as_files(tmp_path: Path) -> None:
    cache, target = tmp_path / "models--owner--name", tmp_path / "disk" / "copy"
    snapshot = cache / "snapshots" / "5f0c"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (cache / "blobs" / "aa11").write_text("weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/aa11")
    command = ["bash", str(ROOT / "slurm" / "stage.sh"), str(snapshot), str(target)]
    subprocess.run(command, check=True)
    copy = target / "model.safetensors"
    assert copy.read_text() == "weights" and not copy.is_symlink()
    inode = copy.stat().st_ino
    subprocess.run(command, check=True)
    assert copy.stat().st_ino == inode, "a complete copy was copied again"
    copy.write_text("cut")
    subprocess.run(command, check=True)
    assert copy.read_text() == "weights"
    (cache / "blobs" / "aa11").unlink()
    broken = subprocess.run(command, capture_output=True, text=True)
    assert broken.returncode == 1 and "model.safetensors is a link to a file that is not there" in broken.stderr
    assert copy.read_text() == "weights", "the staged file is kept"


def test_a_disk_too_small_for_the_model_is_reported_with_its_node(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "weights").open("wb") as file:
        file.truncate(1 << 20)
        file.write(b"x" * (1 << 20))
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system (run as root)")
    try:
        command = ["bash", str(ROOT / "slurm" / "stage.sh"), str(tmp_path / "model"), str(disk / "copy")]
        result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SLURMD_NODENAME": "n3"})
        assert (
            result.returncode == 1 and result.stderr.startswith(f"node n3: {disk} has ") and "free it" in result.stderr
        )
        assert [path.name for path in disk.iterdir()] == ["copy.lock"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
