"""Measure the effect of routing replay on the mismatch between engine and trainer: `replay.py [--engine sglang]`.

A random Qwen3-MoE with similar expert scores generates in bf16. The trainer computes the log-probs of the same policy in fp32
and in bf16, with and without replay. The weights are untrained, so a changed expert changes a prediction less than in a real
model. The ratio shows the part of the mismatch that is due to routing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from grpo_mega import console
from grpo_mega.cli import main as grpo_mega

sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.benchmarks import kills

MODEL = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 8,
    "layer_types": None,
    "head_dim": 16,
    "num_experts": 24,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "initializer_range": 0.2,  # large, so that experts matter
}
STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    engine = parser.parse_args().engine
    ratios: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        rollout = {"engine": engine, "dtype": "bfloat16", "max_response_length": 48, "mismatch_stop": None}
        config = kills.write_inputs(Path(name), "tp=1", rollout, **MODEL)
        for dtype in ("float32", "bfloat16"):
            without, with_replay = (run(config, Path(name), dtype, replay) for replay in ("false", "true"))
            ratios[dtype] = {
                "k3": round(mean(without["mismatch/k3"]), 6),
                "k3_replayed": round(mean(with_replay["mismatch/k3"]), 6),
                "ratio": round(mean(with_replay["mismatch/k3"]) / mean(without["mismatch/k3"]), 3),
                "moved": round(mean(with_replay["routing/moved"]), 4),
            }
            print(f"trainer in {dtype}, engine in bfloat16: {ratios[dtype]}", flush=True)
    print(json.dumps({"engine": engine, **ratios}))
    return 0


def run(config: Path, folder: Path, dtype: str, replay: str) -> dict[str, list[float]]:
    """Train a few steps with a learning rate so low that the policy does not change. Return the metrics of each step."""
    run_dir = folder / f"{dtype}-{replay}"
    settings = {
        "run_dir": run_dir,
        "model.dtype": dtype,
        "rollout.routing_replay": replay,
        "steps": STEPS,
        "optimizer.lr": 1e-12,
        "checkpoint.interval": 0,
        "batch.prompts_per_step": 8,
    }
    code = grpo_mega(["train", str(config), *(f"--set={key}={value}" for key, value in settings.items())])
    if code:
        raise SystemExit(f"replay: the run ended with code {code}; see {run_dir}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss/total" in row]
    return {name: [row[name] for row in steps] for name in ("mismatch/k3", "routing/moved") if name in steps[0]}


if __name__ == "__main__":
    console.install()
    sys.exit(main())
