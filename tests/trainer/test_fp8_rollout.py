"""Runs of the real trainer with rollouts from FP8 block weights on the embedded engine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("preloaded_python")]

SIZES = {  # each rank of tp=2 holds whole FP8 blocks
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.04,
}
SETTINGS = ("rollout.quantization=fp8", "steps=3", "batch.mini_batches=1", "eval.interval=0")


def run(config: Path, run_dir: Path) -> tuple[int, str]:
    arguments = [part for setting in SETTINGS for part in ("--set", setting)]
    process = kills.start(config, run_dir, arguments, output=subprocess.PIPE)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


@pytest.mark.full
def test_a_run_with_fp8_rollouts_has_a_small_but_nonzero_mismatch(tmp_path: Path) -> None:
    config = kills.write_inputs(tmp_path, "tp=2")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SIZES))
    code, output = run(config, tmp_path / "run")
    assert code == 0, output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss/total" in row]
    assert len(steps) == 3
    for row in steps:  # without quantization abs_max is below 1e-5
        assert row["ratio/mean"] == row["ratio/max"] == 1.0
        assert 1e-4 < row["mismatch/abs_mean"] < 0.1
        assert 1e-7 < row["mismatch/k3"] < 0.01
        assert row["grad_norm"] > 0


def test_a_model_whose_fp8_blocks_would_straddle_ranks_is_refused(tmp_path: Path) -> None:
    code, output = run(kills.write_inputs(tmp_path, "tp=2"), tmp_path / "run")
    assert code == 2
    [line] = output.splitlines()
    assert "layout.tp=2 cuts model.layers.{i}.self_attn.q_proj.weight at row 32 of 64" in line
    assert line.endswith("inside a block of rollout.quantization='fp8'; leave rollout.quantization out")
    assert not (tmp_path / "run").exists()
