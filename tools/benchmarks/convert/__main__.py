"""Compare the conversion of a random model with mbridge 0.15.1 and with plain copying. Each runs in turn, in its own
process.

`python tools/benchmarks/convert [--params 2e8 | --full | --tensors 10000] [--rounds N] [--workers N] [--back]`: --full
is a model of 10^9 parameters, --tensors an MoE model with about that many small tensors; --back converts the other way.
Without arguments a smaller model is done within a minute. --folder is the place for files. Imports are not measured.
Before each run the disk has nothing left to write, and as much memory as the model needs is free. Without mbridge its
figures are null. The last line is JSON: cpu_ratio and wall_ratio (ours / mbridge, including our verification; upper
bounds if mbridge_cut_short, because it was stopped at --limit), extra_peak_mib and allowed_peak_mib (largest tensor x
workers + 64 MiB), copy_speed_share (our writing speed / copying speed), read_back_seconds. Exit code 1 if a conversion
needed more memory than allowed."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/convert`

from grpo_mega.distributed.launch import free_port
from grpo_mega.paths import user_path
from tools.benchmarks import harness
from tools.benchmarks.gpu.models import config_fields

SPARE_MIB = 64
DEFAULT_PARAMS, FULL_PARAMS = 1.5e8, 1e9
BLOCK = 1 << 24  # bytes; the weights repeat one random block of this size


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--params", type=float, default=DEFAULT_PARAMS)
    parser.add_argument("--full", action="store_true", help=f"{FULL_PARAMS:.0e} parameters, three rounds")
    parser.add_argument("--tensors", type=int, help="use an MoE model with about this many small tensors")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which mbridge is stopped")
    parser.add_argument("--back", action="store_true", help="Megatron -> Hugging Face")
    parser.add_argument("--folder", type=user_path, help="default: the system's folder for temporary files")
    options = parser.parse(arguments, tensors=1, rounds=1, workers=1)
    options.rounds = options.rounds or (3 if options.full else 1)
    if missing := [name for name in ("mbridge", "einops") if importlib.util.find_spec(name) is None]:
        print(f"{', '.join(missing)} not installed; to compare with mbridge run .venv/bin/pip install -e '.[peers]'")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        config = moe(options.tensors) if options.tensors else dense(FULL_PARAMS if options.full else options.params)
        tensors, num_bytes, largest = make_model(folder / "hf", config)
        size = f"{num_bytes / 2e9:.3f} billion parameters in {tensors} tensors"
        print(f"{config['model_type']}, {size}, bfloat16", flush=True)
        source = folder / ("megatron" if options.back else "hf")
        if options.back:
            convert("ours", folder / "hf", source, options)
        kinds = ["ours", *([] if missing else ["mbridge"]), "copy"]
        variants = {kind: partial(measure, kind, source, folder, options) for kind in kinds}
        rounds = harness.take_turns(variants, options.rounds)
    return report(rounds, num_bytes, round(largest / 2**20 * options.workers + SPARE_MIB))


def report(rounds: dict[str, list[harness.Figures]], num_bytes: int, allowed_peak_mib: int) -> int:
    found = harness.medians(rounds)
    ours, theirs = found["ours"], found.get("mbridge")
    peaks = {name: round(max(one["extra_peak_mib"] for one in all_)) for name, all_ in rounds.items()}
    rows = [("median of rounds", "wall, s", "CPU, s", "extra peak, MiB")]
    rows += [(name, f"{f['wall']:.2f}", f"{f['cpu']:.2f}", f"{f['extra_peak_mib']:.0f}") for name, f in found.items()]
    rows += [(f"  ours, {part}", f"{ours[f'{part}_seconds']:.2f}", "", "") for part in ("write", "proof")]
    result = {
        **{f"{key}_ratio": round(ours[key] / theirs[key], 4) if theirs else None for key in ("cpu", "wall")},
        "extra_peak_mib": peaks["ours"],
        "allowed_peak_mib": allowed_peak_mib,
        "mbridge_peak_mib": peaks.get("mbridge") or None,  # unknown if it was stopped
        "mbridge_cut_short": any(one["cut_short"] for one in rounds.get("mbridge", [])),
        "copy_speed_share": round(found["copy"]["wall"] / (ours["wall"] - ours["proof_seconds"]), 3),
        "read_back_seconds": round(ours["proof_seconds"], 2),
        "gigabytes": round(num_bytes / 1e9, 3),
        "rounds": len(rounds["ours"]),
    }
    return harness.report(rows, result, limits={"extra_peak_mib": allowed_peak_mib})


def dense(num_params: float) -> dict[str, Any]:
    """Return the config of a Llama with about `num_params` parameters and a realistic vocabulary."""
    layers = 16
    width = next(w for w in range(128, 8192, 128) if layers * 11.25 * w * w + 2 * 32000 * w >= num_params or w == 8064)
    ffn, heads = width * 3 - width * 3 % 128, width // 64
    more = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    return config_fields("llama", layers, width, ffn, heads, heads // 2, 32000, tie_word_embeddings=False, **more)


def moe(num_tensors: int) -> dict[str, Any]:
    layers = 4
    experts: dict[str, Any] = {
        "num_experts": max(2, (num_tensors // layers - 9) // 3),
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    experts |= {"moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}
    more = {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16", "head_dim": 16, "tie_word_embeddings": False}
    return config_fields("qwen3_moe", layers, 64, 128, 4, 2, 1024, **experts, **more)


def make_model(folder: Path, config: dict[str, Any]) -> tuple[int, int, int]:
    """Write config and one safetensors file. Return number of tensors, total bytes, bytes of the largest."""
    import torch

    from grpo_mega.weights.families import family_of
    from grpo_mega.weights.spec import ModelShape

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shapes = family_of(config["model_type"]).hf_tensors(ModelShape.from_hf_config(config))
    header: dict[str, Any] = {}
    offset, largest = 0, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
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


def measure(kind: str, source: Path, folder: Path, options: argparse.Namespace) -> harness.Figures:
    """Run a conversion, or a copy of the Hugging Face folder, into a new folder. Remove the folder."""
    back = "-back" if options.back and kind != "copy" else ""
    found = convert(kind + back, folder / "hf" if kind == "copy" else source, folder / "out", options)
    shutil.rmtree(folder / "out", ignore_errors=True)
    return found


def convert(kind: str, source: Path, out: Path, options: argparse.Namespace) -> harness.Figures:
    command = [Path(__file__).with_name("child.py"), kind, source, out, options.workers]
    environment = {
        "PYTHONPATH": str(harness.ROOT),
        "OMP_NUM_THREADS": str(options.workers),
        "BENCH_KIND": "moe" if options.tensors else "dense",
        "BENCH_HF": str(out.with_name("hf")),
        "BENCH_PORT": str(free_port()),
    }
    limit = options.limit if kind.startswith("mbridge") else None
    before, started_at = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    try:
        return {"cut_short": 0, **harness.run_child(kind, command, timeout=limit, **environment)}
    except subprocess.TimeoutExpired:
        wall, after = time.monotonic() - started_at, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"wall": wall, "cpu": cpu, "extra_peak_mib": 0, "cut_short": 1}


if __name__ == "__main__":
    harness.start(main)
