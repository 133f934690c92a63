"""Compare learning curves of the quickstart's recipe, in turns and one step ahead, over several seeds of one start model.

A point is the held-out score of the policy after a number of samples. Training rewards cannot be compared, because one step
ahead they come from the policy of the previous step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SEEDS = range(3)
INTERVAL = 3  # steps between points
AHEAD = {"layout.engine_ranks": 1, "rollout.placement": "separate", "rollout.max_staleness": 1, "algorithm.recipe": "partial"}


def compare(engine: str) -> dict[str, object]:
    """Return the largest gap between the mean curves, and the largest spread of the seeds in turns, at equal samples."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, ROOT / "examples" / "arithmetic.py", folder], check=True, stdout=subprocess.DEVNULL)
        found = {
            kind: [_curve(folder, f"{kind}-{seed}", settings | {"seed": seed, "rollout.engine": engine}) for seed in SEEDS]
            for kind, settings in (("turns", {}), ("ahead", AHEAD))
        }
    means = {kind: [statistics.mean(points) for points in zip(*curves, strict=True)] for kind, curves in found.items()}
    gap = max(abs(a - b) for a, b in zip(means["turns"], means["ahead"], strict=True))
    spread = max(max(points) - min(points) for points in zip(*found["turns"], strict=True))
    rounded = {kind: [round(value, 3) for value in curve] for kind, curve in means.items()}
    return {"gap": round(gap, 3), "spread": round(spread, 3), "is_within": gap <= spread, **rounded}


def _curve(folder: Path, name: str, settings: dict[str, object]) -> list[float]:
    """Train. Return the held-out scores without the score of the start model."""
    given = {
        "run_dir": folder / name,
        "model.path": folder / "model",
        "layout.tp": 1,
        "log.progress": False,
        "eval.interval": INTERVAL,
    }
    given |= {"data.train": folder / "train.jsonl", "data.heldout": folder / "heldout.jsonl"} | settings
    command = [sys.executable, "-m", "grpo_mega.cli", "train", str(ROOT / "examples" / "quickstart.yaml")]
    command += [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    if ended.returncode:
        raise SystemExit(f"async: {name} ended with code {ended.returncode}:\n{ended.stdout[-2000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    points = [row["eval/score"] for row in rows if "eval/score" in row][1:]
    print(f"{name}: {' '.join(f'{point:.3f}' for point in points)}", flush=True)
    return points
