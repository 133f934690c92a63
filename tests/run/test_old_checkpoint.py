"""A checkpoint of earlier code resumes: one that commit 287a645 wrote, made by make_old_checkpoint.sh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
LOG_PROBS = 1e-5  # nats; the sums of another machine round otherwise


def test_a_run_that_earlier_code_began_at_pp_2_ends_on_one_rank_as_without_a_stop(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).with_name("old_checkpoint.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    manifest = json.loads((tmp_path / "stopped" / "checkpoints" / "step-000003" / "checkpoint.json").read_text())
    assert manifest["model"].startswith("ModelShape(model_type='qwen2', num_layers=5,")
    settings = ("--set", "run_dir=stopped", "--set", "steps=5", "--resume")
    command = [sys.executable, "-m", "grpo_mega.cli", "train", "config.json", *settings]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resumed after step 3" in ended.stdout
    expected = [json.loads(line) for line in (tmp_path / "expected.jsonl").read_text().splitlines()]
    found = [json.loads(line) for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5]
    for name in ("reward/mean", "loss/total", "loss/kl", "grad_norm"):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=1e-4, abs=LOG_PROBS), name
