"""Measure the effect of routing replay on the mismatch between engine and trainer: `replay.py [--engine sglang]`.

A random Qwen3-MoE with similar expert scores generates in bf16. The trainer computes the log-probs of the same policy
in fp32 and in bf16, with and without replay. The weights are untrained, so a changed expert changes a prediction less
than in a real model. The ratio (with / without replay) shows the part of the mismatch that is due to routing. The last
line is JSON.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import harness, kills

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
SETTINGS = {  # the learning rate is so low that the policy does not change
    "steps": 3,
    "optimizer.lr": 1e-12,
    "checkpoint.interval": 0,
    "batch.prompts_per_step": 8,
}


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--engine", choices=("embedded", "sglang"), default="embedded")
    engine = parser.parse(arguments).engine
    result: dict[str, Any] = {"engine": engine}
    rows: list[Sequence[str]] = [("trainer", "k3", "k3, replayed", "ratio", "tokens and layers with other experts")]
    with tempfile.TemporaryDirectory() as name:
        rollout = {"engine": engine, "dtype": "bfloat16", "max_response_length": 48, "mismatch_stop": None}
        config = kills.write_inputs(Path(name), "tp=1", rollout, **MODEL)
        for dtype in ("float32", "bfloat16"):
            k3, _ = run(config, dtype, "false")
            replayed, moved = run(config, dtype, "true")
            result[dtype] = {
                "k3": round(k3, 6),
                "k3_replayed": round(replayed, 6),
                "ratio": round(replayed / k3, 3),
                "moved": round(moved, 4),
            }
            rows.append((dtype, *map(str, result[dtype].values())))
    return harness.report(rows, result)


def run(config: Path, dtype: str, replay: str) -> tuple[float, float]:
    """Train a few steps. Return the mean k3 in nats per token, and the share of moved tokens and layers."""
    settings = SETTINGS | {"model.dtype": dtype, "rollout.routing_replay": replay}
    rows = harness.train(config, config.parent / f"{dtype}-{replay}", settings)
    steps = [row for row in rows if "loss/total" in row]
    return mean(row["mismatch/k3"] for row in steps), mean(row.get("routing/moved", 0.0) for row in steps)


if __name__ == "__main__":
    harness.start(main)
