"""Measure the gain of separate engine ranks that generate ahead while the trainer trains.

`python tools/benchmarks/async [--engine embedded|sglang] [--repeats 3] [--steps 8]` trains a tiny random model with a geometric
tail of response lengths. One trainer rank is pinned to one core, one engine rank to another. They alternate
(rollout.max_staleness=0) and run one step ahead (1), `repeats` times each. One more run is colocated: one rank on both cores.
`epochs` passes over each rollout balance training and generation. `balance` is seconds of training divided by seconds of
generation when they alternate. Seconds per step are medians over the steps after the first two, then over repeats. `--curves`
compares learning curves of the quickstart's recipe instead (curves.py).

The last line is JSON: seconds by placement, `ratio` (ahead / in turns; the goal is 0.7), `colocated_ratio` (ahead /
colocated), `staleness` (mean over tokens, ahead). Exit code 1 if a token is older than allowed, 2 on a machine with one core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/async`
sys.path.insert(0, str(Path(__file__).parent))  # `async` is a keyword, so it cannot be imported as a package

import curves

from grpo_mega import console
from tools.benchmarks import kills

ROOT = Path(__file__).resolve().parents[3]
LAYOUTS = {"in turns": (1, 0), "ahead": (1, 1), "colocated": (0, 0)}  # (engine ranks, rollout.max_staleness)
WARM_UP = 2  # steps that are not measured
ROLLOUT = {"max_response_length": 128, "stop_token_ids": [*range(3, 240, 16)], "max_concurrent": 512}


@dataclass(frozen=True)
class Measured:
    seconds: float  # per step
    generation: float
    training: float
    staleness: float
    is_young: bool  # True if no token is older than allowed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--epochs", type=int, help="passes over each rollout; default: 1, with sglang 3, to balance the load")
    parser.add_argument("--curves", action="store_true", help="compare learning curves instead, over 3 seeds; about 6 minutes")
    options = parser.parse_args()
    if options.curves:
        print(json.dumps(curves.compare(options.engine)))
        return 0
    options.epochs = options.epochs or {"embedded": 1, "sglang": 3}[options.engine]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        print("async: pins trainer and engine to a core each, but this process may use one only", file=sys.stderr)
        return 2
    found: dict[str, list[Measured]] = {name: [] for name in LAYOUTS}
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name), options)
        for repeat in range(options.repeats):
            for placement in list(LAYOUTS)[: 2 if repeat else 3]:
                measured = run(config, Path(name) / f"{placement}-{repeat}".replace(" ", "-"), placement, cores[:2])
                found[placement].append(measured)
                print(f"{placement:>10}: {measured.seconds:.3f} s per step", flush=True)
    seconds = {name: statistics.median(one.seconds for one in runs) for name, runs in found.items()}
    turns = found["in turns"]
    result = {
        "engine": options.engine,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "ratio": round(seconds["ahead"] / seconds["in turns"], 3),
        "colocated_ratio": round(seconds["ahead"] / seconds["colocated"], 3),
        "balance": round(statistics.median(one.training / one.generation for one in turns), 2),
        "staleness": round(statistics.mean(one.staleness for one in found["ahead"]), 3),
        "within_staleness": all(one.is_young for runs in found.values() for one in runs),
    }
    print(json.dumps(result))
    return 0 if result["within_staleness"] else 1


def write_config(folder: Path, options: argparse.Namespace) -> Path:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    path = kills.write_inputs(folder, "dp=1", ROLLOUT | {"engine": options.engine}, **sizes)
    config = json.loads(path.read_text())
    rows = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(512)]
    Path(config["data"]["train"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config |= {"steps": options.steps, "checkpoint": {"interval": 0}, "eval": {"interval": options.steps, "num_prompts": 1}}
    config["algorithm"] |= {"recipe": "partial", "group_size": 8}
    config["optimizer"] |= {"lr": 1e-7}  # so low that lengths stay the same, in every placement
    config["batch"] = {"prompts_per_step": 16, "epochs": options.epochs, "tokens_per_micro_batch": 4096}
    path.write_text(json.dumps(config))
    return path


def run(config: Path, run_dir: Path, placement: str, cores: list[int]) -> Measured:
    """Train in a process that starts the ranks and pins them for the placement."""
    engine_ranks, staleness = LAYOUTS[placement]
    settings = {"run_dir": run_dir, "layout.engine_ranks": engine_ranks, "rollout.max_staleness": staleness}
    settings |= {"rollout.placement": "separate" if engine_ranks else "colocated"}
    pinned = "/".join(map(str, cores)) if engine_ranks else ",".join(map(str, cores))
    command = [sys.executable, str(Path(__file__).with_name("pinned.py")), f"{run_dir}-logs", pinned, "train", str(config)]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    log, environment = run_dir.with_suffix(".log"), os.environ | {"PYTHONPATH": str(ROOT)}  # to import the reward
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        raise SystemExit(f"async: the run {placement} ended with code {code}:\n{log.read_text()[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return measure([row for row in rows if "loss/total" in row], staleness)


def measure(rows: list[dict[str, Any]], allowed: int) -> Measured:
    warm = rows[WARM_UP:]

    def median(*names: str) -> float:
        return statistics.median(sum(row.get(f"seconds/{name}", 0.0) for name in names) for row in warm)

    return Measured(
        seconds=median("step"),
        generation=median("sample", "reward", "exchange"),
        training=median("update", "logprobs", "reference", "pack"),
        staleness=statistics.mean(row.get("staleness/mean", 0.0) for row in warm),
        is_young=all(row.get("staleness/max", 0.0) <= allowed for row in rows),
    )


if __name__ == "__main__":
    console.install()
    sys.exit(main())
