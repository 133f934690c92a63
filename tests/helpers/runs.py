"""Write a small run's inputs, start and stop training runs on this machine, and read their files."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml

from tools.benchmarks import kills


def write_small(folder: Path) -> Path:
    """Write the data and the config of a run of one step that reads the model in `folder`/model. Return the config.

    The paths in it are relative to the folder.
    """
    rows = [json.dumps({"prompt": f"{i}+1=?", "answer": str(i + 1)}) + "\n" for i in range(4)]
    (folder / "train.jsonl").write_text("".join(rows))
    raw = {
        "run_dir": "run",
        "steps": 1,
        "device": "cpu",
        "model": {"path": "model", "dtype": "float32"},
        "data": {"train": "train.jsonl", "max_prompt_length": 64},
        "rollout": {"max_response_length": 4},
        "algorithm": {"group_size": 2},
        "rewards": {"functions": [{"name": "format"}], "num_workers": 1},
        "batch": {"prompts_per_step": 2, "tokens_per_micro_batch": 256},
        "log": {"progress": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    return folder / "config.yaml"


def start(config: Path, run_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a run with one pipe for stdout and stderr."""
    return kills.start(config, run_dir, list(arguments), output=subprocess.PIPE)


def run(config: Path, run_dir: Path, *arguments: str) -> tuple[int, str]:
    process = start(config, run_dir, *arguments)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def stop_after(config: Path, run_dir: Path, step: int, *arguments: str) -> str:
    """Run until `step` is logged, then stop the run by its stop file. Return its output."""
    process = start(config, run_dir, *arguments)
    wait_for_step(run_dir, step, process)
    (run_dir / "stop").touch()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while f'{{"step": {step}, ' not in read(run_dir / "metrics.jsonl"):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def losses(run_dir: Path) -> list[float]:
    return [row["loss/total"] for row in metrics(run_dir) if "loss/total" in row]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def check_same_weights(found: Path, expected: Path) -> None:
    """Assert that two exported folders have the same tensors, bit by bit. Their order in the file may differ."""
    from safetensors.torch import load_file

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].numpy().tobytes() == theirs[name].numpy().tobytes() for name in theirs)
