"""Start and stop training runs on this machine, and read their files."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from tools.benchmarks import kills


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
