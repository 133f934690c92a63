"""Compare the conversion of a random model with mbridge 0.15.1 and with plain copying. Each runs in turn, in its own process.

`python tools/benchmarks/convert [--params 2e8 | --full | --tensors 10000] [--rounds N] [--workers N] [--back]`: --full is a
model of 10^9 parameters, --tensors an MoE model with about that many small tensors; --back converts the other way. Without
arguments a smaller model is done within a minute. --folder is the place for files. Imports are not measured. Before each run
the disk has nothing left to write, and as much memory as the model needs is free. mbridge needs mbridge==0.15.1 and einops;
without them its figures are null. The last line is JSON: cpu_ratio and wall_ratio (ours / mbridge, including our verification;
upper bounds if mbridge_cut_short, because it was stopped at --limit), extra_peak_mib and allowed_peak_mib (largest tensor x
workers + 64 MiB), copy_speed_share (our writing speed / copying speed), read_back_seconds."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from grpo_mega import console
from grpo_mega.paths import user_path

ROOT = Path(__file__).resolve().parents[3]
CHILD = Path(__file__).with_name("child.py")
SPARE_MIB = 64
DEFAULT_PARAMS, FULL_PARAMS = 1.5e8, 1e9
BLOCK = 1 << 24  # bytes; the weights repeat one random block of this size


def main() -> int:
    options = parse()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        config = moe(options.tensors) if options.tensors else dense(FULL_PARAMS if options.full else options.params)
        tensors, num_bytes, largest = make_model(folder / "hf", config)
        print(f"{config['model_type']}, {num_bytes / 2e9:.3f} billion parameters in {tensors} tensors, bfloat16", flush=True)
        results = measure(options, folder, "moe" if options.tensors else "dense")
    print_table(results)
    print(json.dumps(summary(results, num_bytes, largest, options.workers)))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=DEFAULT_PARAMS)
    parser.add_argument("--full", action="store_true", help=f"{FULL_PARAMS:.0e} parameters, three rounds")
    parser.add_argument("--tensors", type=int, help="use an MoE model with about this many small tensors")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which mbridge is stopped")
    parser.add_argument("--back", action="store_true", help="Megatron -> Hugging Face")
    parser.add_argument("--folder", type=user_path, help="default: the system's folder for temporary files")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.full else 1)
    return options


def dense(num_params: float) -> dict[str, Any]:
    """Return the config of a Llama with about `num_params` parameters and a realistic share of them in the vocabulary."""
    layers = 16
    width = next(w for w in range(128, 8192, 128) if layers * 11.25 * w * w + 2 * 32000 * w >= num_params or w == 8064)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": width * 3 - width * 3 % 128,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 128,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def moe(num_tensors: int) -> dict[str, Any]:
    layers = 4
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": max(2, (num_tensors // layers - 9) // 3),
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "dtype": "bfloat16",
    }


def make_model(folder: Path, config: dict[str, Any]) -> tuple[int, int, int]:
    """Write config and one safetensors file of normal numbers. Return number of tensors, total bytes, bytes of the largest."""
    import torch

    from grpo_mega.weights.families import family_of
    from grpo_mega.weights.spec import ModelShape

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = family_of(config["model_type"]).hf_tensors(ModelShape.from_hf_config(config))
    header: dict[str, Any] = {}
    offset, largest = 0, 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset, largest = offset + size, max(largest, size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = torch.randn(BLOCK // 2).mul_(0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = offset
        while left:
            left -= file.write(block[: min(left, BLOCK)])
    return len(shapes), offset, largest


def measure(options: argparse.Namespace, folder: Path, kind: str) -> dict[str, list[dict[str, float]]]:
    """Measure the three programs in turn, round by round."""
    has_mbridge = all(importlib.util.find_spec(name) for name in ("mbridge", "einops"))
    suffix = "-back" if options.back else ""
    source = folder / "hf"
    if options.back:
        source = folder / "megatron"
        run_child("ours", folder / "hf", source, options, {})
    kinds = ["ours" + suffix, *(["mbridge" + suffix] if has_mbridge else []), "copy"]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ("ours", "mbridge", "copy")}
    for number in range(options.rounds):
        for name in kinds if number % 2 == 0 else kinds[::-1]:
            out = folder / "out"
            origin = folder / "hf" if name == "copy" else source
            environment = {"BENCH_KIND": kind, "BENCH_HF": str(folder / "hf"), "BENCH_PORT": str(free_port())}
            results[name.removesuffix("-back")].append(run_child(name, origin, out, options, environment))
            shutil.rmtree(out, ignore_errors=True)
    return results


def run_child(kind: str, source: Path, out: Path, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, str(CHILD), kind, str(source), str(out), str(options.workers)]
    settings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(options.workers)} | environment
    before, started_at = cpu_of_children(), time.monotonic()
    try:
        limit = options.limit if kind.startswith("mbridge") else None
        done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"wall": time.monotonic() - started_at, "cpu": cpu_of_children() - before, "extra_peak_mib": 0, "cut_short": 1}
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def middle(results: list[dict[str, float]], field: str) -> float | None:
    return median(r[field] for r in results) if results else None


def print_table(results: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'median of rounds':<20}{'wall, s':>10}{'CPU, s':>10}{'extra peak, MiB':>18}")
    for name, rounds in results.items():
        if rounds:
            wall, cpu, peak = (median(r[f] for r in rounds) for f in ("wall", "cpu", "extra_peak_mib"))
            print(f"{name:<20}{wall:>10.2f}{cpu:>10.2f}{peak:>18.0f}")
    print(f"{'  ours, writing':<20}{middle(results['ours'], 'write_seconds'):>10.2f}")
    print(f"{'  ours, reading back':<20}{middle(results['ours'], 'proof_seconds'):>10.2f}")


def summary(results: dict[str, list[dict[str, float]]], num_bytes: int, largest: int, workers: int) -> dict[str, Any]:
    def ratio(field: str) -> float | None:
        theirs = middle(results["mbridge"], field)
        mine = middle(results["ours"], field)
        return round(mine / theirs, 4) if theirs and mine else None

    write = median(r["wall"] - r["proof_seconds"] for r in results["ours"])
    copy = median(r["wall"] for r in results["copy"])
    return {
        "cpu_ratio": ratio("cpu"),
        "wall_ratio": ratio("wall"),
        "extra_peak_mib": round(max(r["extra_peak_mib"] for r in results["ours"])),
        "allowed_peak_mib": round(largest / 2**20 * workers + SPARE_MIB),
        "mbridge_peak_mib": (results["mbridge"] and round(max(r["extra_peak_mib"] for r in results["mbridge"]))) or None,
        "mbridge_cut_short": any("cut_short" in r for r in results["mbridge"]),
        "copy_speed_share": round(copy / write, 3),
        "read_back_seconds": round(middle(results["ours"], "proof_seconds") or 0, 2),
        "gigabytes": round(num_bytes / 1e9, 3),
        "rounds": len(results["ours"]),
    }


if __name__ == "__main__":
    console.install()
    sys.exit(main())
