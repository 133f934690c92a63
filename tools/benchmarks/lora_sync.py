"""Compare the two syncs of an adapter in bf16: merged into the weights, and alone (sync.lora).

`python tools/benchmarks/lora_sync.py` trains a small random model with an adapter twice. An SGLang server gets merged
weights or only the adapter. Figures of each run, after the steps of --steps:
 k3       mismatch of the step, the KL between engine and trainer in nats per token (mean of the last 10 steps)
 changed  share of the entries of the adapted matrices whose value in the engine differs from the base. Merged weights
          are rounded to bf16, so small updates vanish; an adapter that is sent alone loses none
The last line is JSON. Exit code 1 if the adapter's mismatch is above the merged one's after the last step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import harness, kills

MODES = ("merged", "adapter")
LORA = {"rank": 8, "alpha": 16.0}
LAST = 10  # number of steps whose mismatch is averaged


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--steps", default="20,200", help="numbers of steps after which to compare")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse(arguments)
    result: dict[str, float] = {}
    rows: list[tuple[str, ...]] = [("", "k3", "changed")]
    with tempfile.TemporaryDirectory() as name:
        config = write_config(Path(name), options.lr, options.device)
        for mode in MODES:
            for step in map(int, options.steps.split(",")):
                found = measure(config, Path(name) / mode, mode, step)
                result |= {f"{mode}_{key}_{step}": value for key, value in found.items()}
                rows.append((f"{mode}, {step} steps", *(f"{value:.3g}" for value in found.values())))
    merged, alone = (result[f"{mode}_k3_{step}"] for mode in MODES)
    return harness.report(rows, result | {"ratio": alone / merged}, limits={"ratio": 1.0})


def write_config(folder: Path, lr: float, device: str) -> Path:
    """Write the inputs of a run whose reward varies even if the model is untrained."""
    sizes: dict[str, object] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    sizes |= {"layer_types": ["full_attention"] * 4}
    rollout = {"engine": "sglang", "max_response_length": 16, "max_concurrent": 64}
    path = kills.write_inputs(folder, "tp=1", rollout, **sizes, num_key_value_heads=2)
    config = json.loads(path.read_text())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"), dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    config["model"] |= {"init": "checkpoint", "dtype": "bfloat16", "lora": LORA}
    config["optimizer"] |= {"lr": lr, "schedule": "constant"}
    config["eval"] = {"interval": 0}
    del config["data"]["heldout"]
    path.write_text(json.dumps(config | {"device": device}))
    return path


def measure(config: Path, run_dir: Path, mode: str, step: int) -> dict[str, float]:
    """Train or continue a run up to `step`. Return its figures."""
    settings = {"sync.lora": mode, "steps": step, "checkpoint.interval": step}
    rows = [row for row in harness.train(config, run_dir, settings) if "mismatch/k3" in row][-LAST:]
    share = 1.0 if mode == "adapter" else changed(run_dir)
    return {"k3": statistics.mean(row["mismatch/k3"] for row in rows), "changed": share}


def changed(run_dir: Path) -> float:
    """Return the share of the entries of the adapted matrices that differ between the base and the merged model."""
    base, merged = (load_file(folder / "model.safetensors") for folder in (run_dir.parent / "model", run_dir / "hf"))
    adapted = [name for name in merged if "_proj.weight" in name]
    num_changed = sum(int((merged[name] != base[name]).sum()) for name in adapted)
    return num_changed / sum(base[name].numel() for name in adapted)


if __name__ == "__main__":
    harness.start(main)
