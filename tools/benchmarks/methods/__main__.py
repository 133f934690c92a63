"""Trains a start model with several methods, each with several seeds, on a task that tells them apart (task.py).

    python tools/benchmarks/methods [OUT] [--methods grpo dapo ...] [--steps 30] [--seeds 0 1 2]

All keys but the method's own are in task.yaml. Leaves OUT/task-SEED (model and data, shared by the methods), OUT/METHOD-SEED
(a run each), OUT/methods.png and OUT/methods.json; prints a table, and that JSON as the last line. Runs that are finished are
not made again, so that an interrupted comparison goes on with the same command. Two runs share the machine, a core each: ten
minutes. Without OUT: two methods with one seed in a temporary folder, in a minute and a half.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import mean, median, variance
from typing import Any

from grpo_mega.config import load
from grpo_mega.config.algorithm import RECIPES
from grpo_mega.observe.curves import Curve, read_curves

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
METHODS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "process_supervision")
TARGET = 0.9
STEP_REWARDS = {  # what a method needs beside its recipe
    "process_supervision": {
        "rewards.functions": "[{name: arithmetic_steps, weight: 1.0}, {name: accuracy, weight: 1.0}]",
        "rewards.step_splitter": "lines",
    }
}


@dataclass(frozen=True)
class Run:
    """The curves of one run, by samples generated so far."""

    samples: list[float]  # at each evaluation
    scores: list[float]  # held-out, greedy
    lengths: list[float]  # of the responses in the rollout before each evaluation, tokens, from the second evaluation on
    entropies: list[float]  # nats per token, as the lengths

    @property
    def area(self) -> float:
        """Mean score over the evaluations after the first: what a method gained, and how soon."""
        return mean(self.scores[1:])

    @property
    def samples_to_target(self) -> float | None:
        return next((n for n, score in zip(self.samples, self.scores, strict=True) if score >= TARGET), None)


@dataclass(frozen=True)
class Row:
    """One method; lists have a value per seed."""

    method: str
    area: list[float]
    final: list[float]
    samples_to_target: list[float | None]
    length: list[float]  # at the end, tokens
    entropy: list[float]  # at the end, nats per token


def main() -> int:
    options = _options()
    if options.out is not None:
        return _compare(options.out, options)
    with tempfile.TemporaryDirectory() as out:
        options.methods, options.seeds = options.methods[:1] + options.methods[-1:], options.seeds[:1]
        return _compare(Path(out), options)


def _compare(out: Path, options: argparse.Namespace) -> int:
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: _make_task(out, seed), options.seeds))
        for finished in [pool.submit(_train, out, m, seed, options.steps) for seed in options.seeds for m in options.methods]:
            finished.result()
    runs = {m: [_read(out / f"{m}-{seed}" / "metrics.jsonl") for seed in options.seeds] for m in options.methods}
    rows = [_row(method, found) for method, found in runs.items()]
    print(_table(rows))
    _draw(runs, out / "methods.png")
    result = {
        "target": TARGET,
        "steps": options.steps,
        "seeds": options.seeds,
        "separation": separation([row.area for row in rows]),
        "methods": [asdict(row) for row in rows],
    }
    (out / "methods.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def separation(values: Sequence[Sequence[float]]) -> float | None:
    """Return the F ratio of a one-way analysis of variance, between methods to within; None with one seed or method.

    Around 1 the methods differ no more than the seeds of one method do.
    """
    num_seeds = len(values[0])
    if num_seeds < 2 or len(values) < 2:
        return None
    within = mean(variance(row) for row in values)
    return num_seeds * variance([mean(row) for row in values]) / within if within else None


def _make_task(out: Path, seed: int) -> None:
    task = out / f"task-{seed}"
    if not (task / "heldout.jsonl").exists():  # written last
        _call([sys.executable, str(HERE / "task.py"), str(task), "--seed", str(seed)], out / f"task-{seed}.log")


def _train(out: Path, method: str, seed: int, steps: int) -> None:
    """Train unless the run is finished."""
    run, task = out / f"{method}-{seed}", out / f"task-{seed}"
    if (run / "hf").exists():
        return
    overrides: dict[str, Any] = {
        "run_dir": run,
        "steps": steps,
        "seed": seed,
        "model.path": task / "model",
        "data.train": task / "train.jsonl",
        "data.heldout": task / "heldout.jsonl",
        "algorithm.recipe": method,
        **STEP_REWARDS.get(method, {}),
    }
    sets = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    resume = ["--resume"] if (run / "checkpoints").exists() else []
    _call([sys.executable, "-m", "grpo_mega.cli", "train", str(HERE / "task.yaml"), *sets, *resume], out / f"{run.name}.log")


def _call(command: list[str], log: Path) -> None:
    print(f"+ {log.stem}", file=sys.stderr, flush=True)
    with log.open("ab") as output:
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    if code:
        raise SystemExit(f"{log.stem} ended with code {code}; see {log}, and go on with the same command")


def _read(metrics: Path) -> Run:
    curves = read_curves(metrics)
    steps = sorted(curves["seconds/step"])
    config = load(HERE / "task.yaml")
    per_rollout = config.batch.prompts_per_step * config.algorithm.group_size
    rollouts = curves.get("rollouts", {})  # with dynamic sampling a step may need several
    begun = dict(zip(steps, accumulate(per_rollout * rollouts.get(step, 1) for step in steps), strict=True))
    evaluated = sorted(curves["eval/score"])
    later = evaluated[1:]
    return Run(
        [begun.get(step, 0.0) for step in evaluated],
        [curves["eval/score"][step] for step in evaluated],
        _nearest(curves["response_length/mean"], later),
        _nearest(curves["entropy/mean"], later),
    )


def _nearest(curve: Curve, steps: Sequence[int]) -> list[float]:
    """Return the last value at or before each step: a step without an update has none."""
    return [curve[max(s for s in curve if s <= step)] for step in steps]


def _row(method: str, runs: Sequence[Run]) -> Row:
    return Row(
        method,
        [run.area for run in runs],
        [run.scores[-1] for run in runs],
        [run.samples_to_target for run in runs],
        [run.lengths[-1] for run in runs],
        [run.entropies[-1] for run in runs],
    )


def _table(rows: Sequence[Row]) -> str:
    lines = [
        f"| method | mean score | final score | samples to {TARGET} | final length | final entropy |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(rows, key=lambda row: -mean(row.area)):
        reached = [n for n in r.samples_to_target if n is not None]
        samples = f"{median(reached):,.0f} ({len(reached)} of {len(r.final)} seeds)" if reached else "not reached"
        cells = [_spread(r.area, ".2f"), _spread(r.final, ".2f"), samples, _spread(r.length, ".0f"), _spread(r.entropy, ".3f")]
        lines.append(f"| `{r.method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], form: str) -> str:
    """Write the mean and the range over seeds."""
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{mean(values):{form}}{ends}"


def _draw(runs: Mapping[str, Sequence[Run]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
    names = ("held-out score (greedy)", "response length, tokens", "entropy, nats per token")
    for number, (method, found) in enumerate(runs.items()):
        samples = [mean(values) for values in zip(*(run.samples for run in found), strict=True)]
        for axes, rows in zip(
            panels, ([r.scores for r in found], [r.lengths for r in found], [r.entropies for r in found]), strict=True
        ):
            columns = list(zip(*rows, strict=True))
            x = samples[len(samples) - len(columns) :]
            axes.plot(x, [mean(c) for c in columns], color=f"C{number}", label=method, marker=".")
            axes.fill_between(
                x, [min(c) for c in columns], [max(c) for c in columns], color=f"C{number}", alpha=0.12, linewidth=0
            )
    for axes, name in zip(panels, names, strict=True):
        axes.set(xlabel="samples generated, mean over seeds", ylabel=name)
        axes.grid(alpha=0.2)
    panels[0].axhline(TARGET, color="0.6", linewidth=0.8, linestyle=":")
    panels[0].legend(loc="lower right", frameon=False)
    figure.savefig(picture, dpi=110)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT")
    parser.add_argument("--methods", nargs="+", choices=sorted(RECIPES), default=METHODS, metavar="METHOD")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
