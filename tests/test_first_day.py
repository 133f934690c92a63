"""tools/first_day.sh: refused arguments, its report, and the whole script on emulated kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("preloaded_python")

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "first_day.sh"
BENCHMARK = {"section": "mfu", "case": "4B, bf16", "name": "MFU", "unit": "%", "better": "more", "note": ""}
STEP = {"seconds/step": 2.0, "mismatch/k3": 0.001, "grad_norm": 0.5, "reward/mean": 0.25}


def report(folder: Path, metrics: list[dict[str, Any]], **codes: int) -> tuple[int, dict[str, Any]]:
    """Write the files of a first day and run the report. Return its exit code and JSON."""
    (folder / "run").mkdir(parents=True)
    parts = [{"name": name, "code": code, "seconds": 7} for name, code in codes.items()]
    (folder / "steps.jsonl").write_text("".join(json.dumps(part) + "\n" for part in parts))
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    rows = [
        BENCHMARK | {"value": 41.25, "target": 40.0, "met": True},
        BENCHMARK | {"value": None, "target": 40.0, "met": None},
    ]
    bench = {"date": "2026-11-22", "card": "H100", "versions": {"torch": "2.13.0"}, "rows": rows, "tiny": False}
    (folder / "benchmarks.log").write_text(f"some text\n{json.dumps(bench)}\n")
    (folder / "plan.log").write_text("note: a line\n" + json.dumps({"step_seconds": 1.0}, indent=1) + "\n")
    command = [sys.executable, str(ROOT / "tools" / "first_day_report.py"), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    found = json.loads((folder / "report.json").read_text())
    page = (folder / "report.md").read_text()
    assert all(row["name"] in page for row in found["rows"])
    return result.returncode, found


def test_every_value_is_reported_with_its_target(tmp_path: Path) -> None:
    code, found = report(tmp_path, [{"epoch": 0}, STEP, STEP | {"reward/mean": 0.5}], install=0, train=0)
    assert code == 0 and found["failed"] == [] and found["card"] == "H100"
    rows = {row["name"].partition(",")[0]: row for row in found["rows"]}
    assert rows["install"]["met"]
    assert rows["largest mismatch/k3"]["met"] and rows["largest mismatch/k3"]["value"] == 0.001
    assert rows["reward"]["value"] == "0.250 to 0.500" and rows["reward"]["met"] is None
    assert rows["median step"]["value"] == 2 and rows["median step"]["met"] is False, "a slow card does not fail"
    speeds = [(row["value"], row["met"]) for row in found["rows"] if row["part"] == "mfu"]
    assert speeds == [("41.25 %", True), ("none here", None)]


def commands_of(folder: Path, extras: str, *arguments: str) -> list[str]:
    """Return the commands of a first day on two GPUs, from a copy of the script with a fake Python and nvidia-smi."""
    for name in ("tools/first_day.sh", "tools/constraints-one.txt", "examples/env.sh", "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "mine").mkdir()
    (folder / "mine" / "config.json").touch()
    fakes = {
        ".venv/bin/python": f'echo 3.11; echo "$*" >> {folder}/calls',
        "bin/nvidia-smi": "printf 'GPU 0\\nGPU 1\\n'",
    }
    for name, text in fakes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / ".venv" / ".installed").write_text(f"0 {extras}\n")
    environment = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", folder / "tools" / "first_day.sh", folder / "mine", *arguments], env=environment, check=True
    )
    return (folder / "calls").read_text().splitlines()


def test_a_first_day_needs_neither_transformer_engine_nor_sglang(tmp_path: Path) -> None:
    runs = [line for line in commands_of(tmp_path / "all", "gpu dev") if "cli train" in line]
    [run] = [line for line in runs if "steps=1 " not in line and "steps=3 " not in line]
    assert "rollout.engine=sglang" in run and "precision.fp8=hybrid" in run
    commands = commands_of(tmp_path / "less", "dev", "--without", "te,sglang")
    runs = [line for line in commands if "cli train" in line]
    assert len(runs) == 3 and all("rollout.engine=embedded" in run and "fp8" not in run for run in runs)
    assert not any("--nvcc" in line or "[gpu" in line or "gpu]" in line for line in commands)


def test_memory_and_whole_steps_come_first_and_fp8_rollouts_last(tmp_path: Path) -> None:
    """The order of the commands is the order in which a first hour on a card answers questions."""
    commands = commands_of(tmp_path / "day", "gpu dev")
    words = (
        "check_node.py",
        "check_allreduce.py",
        "tests/gpu/test_memory.py",
        "tests/gpu/test_whole_steps.py",
        "deterministic1",
        "deterministic2 --set rollout.engine=embedded",
        "--same",
        "cli plan",
        "tools/benchmarks/gpu",
        "--ignore=tests/gpu/test_memory.py",
        "rollout.quantization=fp8",
        "cli report",
    )
    places = [next(i for i, line in enumerate(commands) if word in line) for word in words]
    assert places == sorted(places) and len(set(places)) == len(places), commands


def test_two_runs_have_the_same_bits_only_if_every_figure_is_equal(tmp_path: Path) -> None:
    row = STEP | {"loss/total": 0.1234567891234567}
    other = {"times": row | {"seconds/step": 3.0}, "bits": row | {"grad_norm": 0.5000000001}, "none": STEP}
    for name, figures in {"first": row, **other}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(figures) + "\n")

    def compared(name: str) -> tuple[int, str]:
        command = [sys.executable, str(ROOT / "tools" / "first_day_report.py"), str(tmp_path / "first")]
        result = subprocess.run([*command, "--same", str(tmp_path / name)], capture_output=True, text=True)
        return result.returncode, result.stdout

    assert compared("times")[0] == 0
    code, text = compared("bits")
    assert code == 1 and "step 1: grad_norm" in text and "0.5000000001" in text
    code, text = compared("none")
    assert code == 1 and "steps: 1 and 0" in text


def test_failed_parts_and_broken_rules_of_the_run_end_in_code_1(tmp_path: Path) -> None:
    code, found = report(tmp_path / "a", [STEP, STEP | {"mismatch/k3": 0.2}], install=0, tests=1, train=0)
    assert code == 1 and len(found["failed"]) == 2 and found["failed"][0] == "tests" and "k3" in found["failed"][1]
    code, found = report(tmp_path / "b", [STEP | {"grad_norm": 0.0}], train=0)
    assert code == 1 and len(found["failed"]) == 1 and "gradient" in found["failed"][0]
    code, found = report(tmp_path / "c", [], train=2)
    assert code == 1 and found["failed"] == ["train", "steps"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nvidia-smi shows no GPU; use a machine with one, or --cpu to try the script"),
        (["--gpus", "8"], "--gpus is not known; usage: tools/first_day.sh MODEL"),
        (["--out"], "--out needs a value; usage: "),
        (["mine", "--without", "apex"], "--without apex: must be te, sglang, or te,sglang"),
        (["--cpu", "--without", "te"], "--cpu runs everything on emulated kernels; leave --without out"),
        (["--cpu", "models/mine"], "--cpu makes its own model; leave models/mine out"),
        (["--cpu", "--out", "tests"], "--out tests is there already; name another folder"),
    ],
    ids=str,
)
def test_wrong_arguments_are_a_one_line_error_and_leave_nothing(arguments: list[str], said: str) -> None:
    before = sorted(path.name for path in ROOT.glob("runs/first_day*"))
    environment = os.environ | {"PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        ["bash", str(SCRIPT), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1 and result.stderr.startswith(f"first_day.sh: error: {said}")
    assert result.stderr.count("\n") == 1 and not result.stdout
    assert sorted(path.name for path in ROOT.glob("runs/first_day*")) == before


@pytest.mark.full
@pytest.mark.sglang
def test_the_whole_day_on_emulated_kernels(tmp_path: Path) -> None:
    out = tmp_path / "day"
    result = subprocess.run(
        ["bash", str(SCRIPT), "--cpu", "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((out / "report.json").read_text())
    parts = [row["name"] for row in found["rows"] if row["part"] == "parts"]
    assert parts == ["install", "tests", "benchmarks", "plan", "train", "html"]
    assert {row["part"] for row in found["rows"]} >= {"run", "speed", "mfu", "logprobs", "engine", "step"}
    assert (out / "run" / "report.html").exists() and (out / "run" / "hf").is_dir()
