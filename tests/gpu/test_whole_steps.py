"""Run whole steps with the trainer and an SGLang server on one GPU, as `grpo-mega train` does."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools.benchmarks.gpu.rank import Options
from tools.benchmarks.gpu.step import settings_of, write_inputs

WHICH = ("free", "planned_free")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("sleep", ["always", "auto"])
def test_trainer_and_server_share_a_gpu_through_whole_steps(sleep: str, tmp_path: Path) -> None:
    """Trainer and server agree on log-probs up to bf16 rounding. With sleep=always both offload for each other at each
    step; with auto only until both are seen to fit."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    settings = settings_of(Options(quick=True, tiny=False, say=print), tmp_path)
    settings |= {"steps": 3, "rollout": settings["rollout"] | {"sleep": sleep}}
    write_inputs(tmp_path, "qwen2.5-0.5b")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "grpo_mega.cli", "train", str(tmp_path / "config.yaml")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss/total" in row]
    assert len(steps) == 3
    for row in steps:
        assert row["mismatch/k3"] < 0.02 and row["mismatch/abs_mean"] < 0.05
        assert all(
            row[f"memory/{which}_{phase}_gib"] > 0 for which in WHICH for phase in ("generation", "training", "sync")
        )
        assert ("memory/free_asleep_gib" in row) == (row.get("seconds/sleep", 0) > 0)
    moves = [row.get("seconds/sleep", 0) > 0 for row in steps]
    assert moves == ([True] * 3 if sleep == "always" else [True, False, False])
    said = " ".join((result.stdout + result.stderr).split())  # join the lines that the console broke
    assert ("fit on the device together" in said) == (sleep == "auto")
