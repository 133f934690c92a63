"""Measure the gain of separate engine ranks that generate ahead while the trainer trains.

`python tools/benchmarks/async.py [--engine embedded|sglang] [--repeats 3] [--steps 8]` trains a tiny random model with
a geometric tail of response lengths. One trainer rank is pinned to one core, one engine rank to another. They alternate
(rollout.max_staleness=0) and run one step ahead (1), `repeats` times each. One more run is colocated: one rank on both
cores. `epochs` passes over each rollout balance training and generation. `balance` is seconds of training divided by
seconds of generation when they alternate. Seconds per step are medians over the steps after the first two, then over
repeats.

The last line is JSON: seconds by placement, `ratio` (ahead / in turns; the goal is 0.7), `colocated_ratio` (ahead /
colocated), `staleness` (mean over tokens, ahead). Exit code 1 if a token is older than allowed, 2 on a machine with one
core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from grpo_mega.cli import main as grpo_mega
from grpo_mega.distributed.launch import run_ranks
from grpo_mega.errors import ConfigError
from tools.benchmarks import harness, kills

LAYOUTS = {"in turns": (1, 0), "ahead": (1, 1), "colocated": (0, 0)}  # (engine ranks, rollout.max_staleness)
WARM_UP = 2  # steps that are not measured
ROLLOUT = {"max_response_length": 128, "stop_token_ids": [*range(3, 240, 16)], "max_concurrent": 512}
PINNED = "--pinned"  # first argument of the processes that this file starts


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--epochs", type=int, help="passes over each rollout; default: 1, with sglang 3, to balance the load"
    )
    options = parser.parse(arguments, repeats=1, steps=WARM_UP + 1, epochs=1)
    options.epochs = options.epochs or {"embedded": 1, "sglang": 3}[options.engine]
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise ConfigError("async: pins trainer and engine to a core each, but this process may use one only")
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name), options)
        runs = {placement: partial(run, config, placement, cores) for placement in LAYOUTS}
        rounds = harness.take_turns({"colocated": runs.pop("colocated")}, 1)
        rounds = harness.take_turns(runs, options.repeats) | rounds
    found = harness.medians(rounds)
    seconds = {placement: found[placement]["seconds"] for placement in LAYOUTS}
    balance = statistics.median(one["training"] / one["generation"] for one in rounds["in turns"])
    is_young = all(one["oldest"] <= LAYOUTS[placement][1] for placement, all_ in rounds.items() for one in all_)
    result = {
        "engine": options.engine,
        "seconds": {placement: round(value, 3) for placement, value in seconds.items()},
        "ratio": round(seconds["ahead"] / seconds["in turns"], 3),
        "colocated_ratio": round(seconds["ahead"] / seconds["colocated"], 3),
        "balance": round(balance, 2),
        "staleness": round(statistics.mean(one["staleness"] for one in rounds["ahead"]), 3),
        "within_staleness": is_young,
    }
    rows = [("", "seconds per step"), *((placement, f"{value:.3f}") for placement, value in seconds.items())]
    return harness.report(
        rows, result, problems=[] if is_young else ["a token is older than rollout.max_staleness allows"]
    )


def write_config(folder: Path, options: argparse.Namespace) -> Path:
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,
    }
    path = kills.write_inputs(folder, "dp=1", ROLLOUT | {"engine": options.engine}, **sizes)
    config = json.loads(path.read_text())
    rows = [{"prompt": f"Say {i}.", "answer": str(i)} for i in range(512)]
    Path(config["data"]["train"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config |= {
        "steps": options.steps,
        "checkpoint": {"interval": 0},
        "eval": {"interval": options.steps, "num_prompts": 1},
    }
    config["algorithm"] |= {"recipe": "partial", "group_size": 8}
    config["optimizer"] |= {"lr": 1e-7}  # so low that lengths stay the same, in every placement
    config["batch"] = {"prompts_per_step": 16, "epochs": options.epochs, "tokens_per_micro_batch": 4096}
    path.write_text(json.dumps(config))
    return path


def run(config: Path, placement: str, cores: list[int]) -> harness.Figures:
    """Train in a process that starts the ranks and pins them for the placement. Return seconds by activity, and
    staleness.
    """
    engine_ranks, staleness = LAYOUTS[placement]
    run_dir = Path(tempfile.mkdtemp(dir=config.parent)) / placement.replace(" ", "-")
    pinned = "/".join(map(str, cores)) if engine_ranks else ",".join(map(str, cores))
    settings = {
        "layout.engine_ranks": engine_ranks,
        "rollout.max_staleness": staleness,
        "rollout.placement": "separate" if engine_ranks else "colocated",
    }
    rows = harness.train(config, run_dir, settings, program=(__file__, PINNED, f"{run_dir}-logs", pinned))
    rows = [row for row in rows if "loss/total" in row]

    def median(*names: str) -> float:
        return statistics.median(sum(row.get(f"seconds/{name}", 0.0) for name in names) for row in rows[WARM_UP:])

    found = {
        "seconds": median("step"),
        "generation": median("sample", "reward", "exchange"),
        "training": median("update", "logprobs", "reference", "pack"),
        "staleness": statistics.mean(row.get("staleness/mean", 0.0) for row in rows[WARM_UP:]),
        "oldest": max(row.get("staleness/max", 0.0) for row in rows),
    }
    print(f"{placement:>10}: {found['seconds']:.3f} s per step", flush=True)
    return found


def pinned(logs: str, cores: str, *arguments: str) -> int:
    """Run `grpo-mega ARGUMENTS` with each rank pinned to its cores: "0/1" has two ranks, "0,1" has one on both
    cores.
    """
    by_rank: list[Any] = [[int(core) for core in part.split(",")] for part in cores.split("/")]
    if "RANK" not in os.environ:
        return run_ranks([sys.executable, *sys.argv], len(by_rank), Path(logs))
    os.sched_setaffinity(0, by_rank[int(os.environ["RANK"])])
    return grpo_mega([*arguments])


if __name__ == "__main__":
    harness.start((lambda: pinned(*sys.argv[2:])) if sys.argv[1:2] == [PINNED] else main)
