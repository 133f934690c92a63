"""Runs of the quickstart's recipe on emulated kernels with a real SGLang server, to measure the mismatch of each FP8
recipe.

    python -m tests.te_on_cpu.whole_steps OUT [--steps 3]

For each recipe, run a bf16 server and a server with FP8 block weights: STEPS steps of a random model, at a learning
rate too small to change a response. Prints one JSON row per run: mismatch/k3, the mean over the steps, in nats per
token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo_mega import config as configs
from grpo_mega.cli.checks.precision import environment
from tests.helpers.models import make_model, save_checkpoint
from tests.te_on_cpu.emulated_te import launcher

# Differences from the quickstart: bf16, one rank, a server as engine, a model that cannot add.
CHANGES: dict[str, Any] = {
    "model.dtype": "bfloat16",
    "layout": {},
    "data.heldout": None,
    "rollout.engine": "sglang",
    "rollout.max_response_length": 24,
    "rollout.cache_tokens": 4096,
    "rewards.functions": [{"name": "tools.benchmarks.kills.share_of_vowels"}],
    "rewards.num_workers": 1,
    "batch.prompts_per_step": 4,
    "log.progress": False,
}
IN_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 1}
RECIPES = (None, "tensorwise", "delayed", "blockwise")
SERVERS = {"bf16": None, "fp8": "fp8"}


@dataclass(frozen=True)
class Run:
    """A run in progress or ended."""

    folder: Path
    process: subprocess.Popen[bytes]

    def steps(self) -> list[dict[str, float]]:
        """Wait for the run to end, and return its metrics per step."""
        code = self.process.wait(timeout=600)
        assert code == 0, (self.folder / "log").read_text()
        rows = [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if "loss/total" in row]

    def messages(self) -> list[str]:
        lines = (self.folder / "run" / "messages.jsonl").read_text().splitlines()
        return [str(json.loads(line)["text"]) for line in lines]


def start(folder: Path, model: torch.nn.Module, steps: int, changes: Mapping[str, Any]) -> Run:
    """Start a run of one rank in a process on the emulation. Its server does not see Transformer Engine."""
    config = write_inputs(folder, model, {"steps": steps} | CHANGES | changes)
    variables = launcher.environment() | environment(configs.load(config)) | {"OMP_WAIT_POLICY": "passive"}
    variables["PYTHONPATH"] += os.pathsep + str(launcher.ROOT)  # the reward function is in tools/
    command = launcher.command(launcher.DEFAULT, "grpo_mega.cli", "train", str(config))
    with (folder / "log").open("w") as log:
        return Run(folder, subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=launcher.ROOT))


def write_inputs(folder: Path, model: torch.nn.Module, changes: Mapping[str, Any]) -> Path:
    """Write model, data and config. Return the config's path."""
    save_checkpoint(model, folder / "model")
    rows = [{"prompt": f"{i}+{i + 3}=?", "answer": str(2 * i + 3)} for i in range(10, 40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = yaml.safe_load((launcher.ROOT / "examples" / "quickstart.yaml").read_text())
    own = {
        "run_dir": str(folder / "run"),
        "model.path": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
        "code_dir": str(launcher.ROOT / "examples"),  # has the oracle
    }
    for key, value in {**changes, **own}.items():
        section, _, name = key.rpartition(".")
        (config.setdefault(section, {}) if section else config)[name] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def precision_of(recipe: str | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    return {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_reference": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    model = make_model("qwen2", seed=5, initializer_range=0.05, **IN_BLOCKS)
    for recipe in RECIPES:
        started = {}
        for server, quantization in SERVERS.items():
            changes = {
                "precision": precision_of(recipe),
                "rollout.quantization": quantization,
                "rollout.mismatch_stop": None,
            }
            folder = options.out / f"{recipe or 'bf16'}-{server}"
            folder.mkdir(parents=True)
            started[server] = start(folder, model, options.steps, changes | {"optimizer.lr": 1e-7})
        for server, run in started.items():
            found = [row["mismatch/k3"] for row in run.steps()]
            row = {"recipe": recipe or "bf16", "server": server, "k3": statistics.mean(found), "steps": found}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
