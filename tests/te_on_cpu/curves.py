"""Loss curves of bf16 and the FP8 recipes on emulated kernels: a model of hidden size 256 learns the quickstart's task.

    python -m tests.te_on_cpu.emulated_te.run 2.11.0 tests/te_on_cpu/curves.py OUT
        [--recipes bf16 tensorwise delayed blockwise] [--seeds 0 1] [--steps 50] [--per-step 16] [--minutes N]

Each run of a recipe and a seed writes a file in OUT when it ends; a run whose file exists is skipped. No run starts
after --minutes. One thread. OUT/curves.json has all losses with a table, OUT/curves.png the plot. The seed determines
weights and demonstrations, so runs of one seed differ only in precision. The casts have the bits of the real kernels,
the sums do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from grpo_mega.distributed.launch import only_rank
from grpo_mega.megatron import runtime as runtimes
from tests.helpers.learning import losses
from tools.benchmarks.gpu.rank import config_of

NOTE = "Transformer Engine's real Python on emulated kernels"
LAST = 10  # number of last steps whose mean is a run's final loss
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"recipe": None},
    "tensorwise": {"recipe": "tensorwise"},
    "delayed": {"recipe": "delayed"},
    "blockwise": {"recipe": "blockwise"},
    "tensorwise, weights in FP8": {"recipe": "tensorwise", "keeps_fp8": True},
    "blockwise, weights in FP8": {"recipe": "blockwise", "keeps_fp8": True},
    "bf16, moments in bf16": {"recipe": None, "moments_dtype": "bfloat16"},
}


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with only_rank():
        device = runtimes.join(config_of(Path("unused"), {"path": "unused", "dtype": "bfloat16"}))
        try:
            for seed in options.seeds:
                for name in options.recipes:
                    if time.monotonic() - start < options.minutes * 60:
                        run(options, device, name, seed)
        finally:
            runtimes.stop()
    runs = [json.loads(path.read_text()) for path in sorted(options.out.glob("run-*.json"))]
    runs = [r for r in runs if (r["steps"], r["per_step"]) == (options.steps, options.per_step)]
    rows = table(runs)
    (options.out / "curves.json").write_text(json.dumps({"note": NOTE, "table": rows, "runs": runs}, indent=1) + "\n")
    draw(runs, options.out / "curves.png")
    for row in rows:
        print(json.dumps(row))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--recipes", nargs="+", choices=VARIANTS, default=["bf16", "tensorwise", "delayed", "blockwise"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--per-step", type=int, default=16)
    parser.add_argument("--minutes", type=float, default=60.0)
    return parser.parse_args()


def run(options: argparse.Namespace, device: Any, name: str, seed: int) -> None:
    """Train one variant, unless a file with these settings exists."""
    path = options.out / f"run-{name.replace(', ', '-').replace(' ', '_')}-{seed}.json"
    settings = {"recipe": name, "seed": seed, "steps": options.steps, "per_step": options.per_step}
    if path.exists() and settings.items() <= json.loads(path.read_text()).items():
        return
    start = time.monotonic()
    found = losses(device, **VARIANTS[name], steps=options.steps, per_step=options.per_step, seed=seed)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(settings | {"seconds": round(time.monotonic() - start, 1), "losses": found}) + "\n")
    partial.rename(path)


def table(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return per recipe the mean loss of the last steps over seeds, its spread, and each seed's difference from
    bf16.
    """
    ends: dict[str, dict[int, float]] = {}
    for one in runs:
        ends.setdefault(one["recipe"], {})[one["seed"]] = statistics.mean(one["losses"][-LAST:])
    rows = []
    for recipe in sorted(ends, key=list(VARIANTS).index):
        of = ends[recipe]
        bf16 = ends.get("bf16", {})
        rows.append(
            {
                "recipe": recipe,
                "seeds": len(of),
                "loss": round(statistics.mean(of.values()), 4),
                "spread": round(max(of.values()) - min(of.values()), 4),
                "to_bf16": [round(end / bf16[seed] - 1, 4) for seed, end in sorted(of.items()) if seed in bf16],
            }
        )
    return rows


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    names = [name for name in VARIANTS if any(r["recipe"] == name for r in runs)]
    for number, name in enumerate(names):
        for index, one in enumerate(r for r in runs if r["recipe"] == name):
            axes.plot(
                range(1, len(one["losses"]) + 1), one["losses"], color=f"C{number}", lw=1, label=None if index else name
            )
    axes.set(xlabel="optimizer step", ylabel="nats per token", yscale="log", title=NOTE)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
