"""Trains one starting model with several methods and compares their held-out scores: a table, and one plot of all curves.

    python tools/benchmarks/methods.py OUT [--methods grpo dapo ...] [--steps 30] [--seed 0]

The task, the model and all keys but `algorithm` are the quickstart's (examples/quickstart.yaml); process supervision has
the config of its own example. Leaves OUT/task (model and data, shared), OUT/<method> (a run each), OUT/methods.png and
OUT/methods.json; the last line is that JSON, and the exit code is 1 if a method ends below the target. What is there already is
not made again, so that an interrupted comparison goes on with the same command. Two cores take a minute and a half a method.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_mega.config.algorithm import RECIPES
from grpo_mega.observe.plot import read_curves

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "process_supervision")
CONFIGS = {"process_supervision": "process_supervision.yaml"}
TARGET = 0.95  # what the quickstart asks for


@dataclass(frozen=True)
class Row:
    method: str
    before: float
    after: float
    best: float
    steps_to_target: int | None  # the first evaluation at or above TARGET
    seconds: float  # of its steps, evaluations not counted


def main() -> int:
    options = _options()
    out: Path = options.out
    task = out / "task"
    if not (task / "heldout.jsonl").exists():
        _run([sys.executable, str(ROOT / "examples" / "arithmetic.py"), str(task), "--seed", str(options.seed)])
    rows, curves = [], {}
    for method in options.methods:
        seconds = _train(method, out, task, options.steps, options.seed)
        score = read_curves(out / method / "metrics.jsonl")["eval/score"]
        curves[method] = score
        reached = [step for step, value in sorted(score.items()) if value >= TARGET]
        first, *_, last = (value for _, value in sorted(score.items()))
        rows.append(Row(method, first, last, max(score.values()), reached[0] if reached else None, seconds))
    _draw(curves, out / "methods.png")
    print(_table(rows))
    result = {"target": TARGET, "steps": options.steps, "seed": options.seed, "methods": [asdict(row) for row in rows]}
    (out / "methods.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if all(row.after >= TARGET for row in rows) else 1


def _train(method: str, out: Path, task: Path, steps: int, seed: int) -> float:
    """Runs the method unless its run is complete; returns the seconds that it took, from its metrics where it was there."""
    run = out / method
    if not (run / "hf").exists():
        overrides = {
            "run_dir": run,
            "steps": steps,
            "seed": seed,
            "model.path": task / "model",
            "data.train": task / "train.jsonl",
            "data.heldout": task / "heldout.jsonl",
            "algorithm.recipe": method,
            "eval.interval": 2,
            "checkpoint.interval": 10,
        }
        began = [] if not (run / "checkpoints").exists() else ["--resume"]
        config = ROOT / "examples" / CONFIGS.get(method, "quickstart.yaml")
        sets = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
        _run([sys.executable, "-m", "grpo_mega.cli", "train", str(config), *sets, *began])
    return sum(read_curves(run / "metrics.jsonl")["seconds/step"].values())


def _run(command: list[str]) -> None:
    began = time.monotonic()
    print("+", " ".join(command), file=sys.stderr, flush=True)
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode
    if code:
        raise SystemExit(
            f"{' '.join(command[:4])} ... ended with code {code} after {time.monotonic() - began:.0f} s; see above"
        )


def _table(rows: list[Row]) -> str:
    lines = [f"| method | before | after | best | steps to {TARGET} | seconds of training |", "|---|---|---|---|---|---|"]
    for r in rows:
        reached = r.steps_to_target or "not reached"
        lines.append(f"| `{r.method}` | {r.before:.3f} | {r.after:.3f} | {r.best:.3f} | {reached} | {r.seconds:.0f} |")
    return "\n".join(lines)


def _draw(curves: dict[str, dict[int, float]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
    styles = ("-", "--", "-.", ":")
    for number, (method, curve) in enumerate(curves.items()):
        steps = sorted(curve)
        axes.plot(steps, [curve[s] for s in steps], styles[number // 10 % 4], color=f"C{number % 10}", label=method, marker=".")
    axes.axhline(TARGET, color="0.6", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel="held-out score (greedy)", ylim=(None, 1.01))
    axes.legend(loc="lower right", frameon=False)
    axes.grid(alpha=0.2)
    figure.savefig(picture, dpi=130)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--methods", nargs="+", choices=sorted(RECIPES), default=METHODS, metavar="METHOD")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
