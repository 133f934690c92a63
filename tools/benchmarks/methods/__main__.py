"""Train one start model with several methods and seeds, on a task that shows differences between methods (task.py).

    python tools/benchmarks/methods [OUT] [--methods grpo dapo ...] [--steps 40] [--seeds 0 1 2]

task.yaml has all keys except the method's own. The benchmark writes OUT/task (model and data for all runs), OUT/METHOD-SEED
(one run each), OUT/methods.png and OUT/methods.json. It prints a table, and the JSON as the last line. It skips finished runs,
so the same command continues an interrupted comparison. Two runs share the machine, one core each; all runs take ten minutes.
All figures are at equal numbers of samples: a method that generates more per step, such as dapo, is read at an earlier step.
Without OUT it runs the first and the last method with one seed and 20 steps in a temporary folder, in a minute and a half. If
the start model does not learn on another machine, make it with another seed: `task.py OUT/task --seed 1`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from pathlib import Path
from statistics import mean, variance
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/methods`

import numpy as np

from grpo_mega.config import load
from grpo_mega.config.recipes import RECIPES
from grpo_mega.observe.curves import Curve, read_curves
from grpo_mega.paths import user_path
from tools.benchmarks import harness

HERE = Path(__file__).resolve().parent
METHODS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "process_supervision")
UNFIT = ("opd", "mt_grpo")  # these need a teacher, or rewards of turns
TARGET = 0.9
FORMS = {"mean_score": ".3f", "score": ".3f", "length": ".1f", "entropy": ".3f"}
Figures = dict[str, float | None]  # keys of FORMS, and samples_to_target
STEP_REWARDS = {  # settings that a method needs in addition to its recipe
    "process_supervision": {
        "rewards.functions": "[{name: arithmetic_steps, weight: 1.0}, {name: accuracy, weight: 1.0}]",
        "rewards.step_splitter": "lines",
    }
}


@dataclass(frozen=True)
class Run:
    """The curves of one run; each list has a value per evaluation."""

    samples: list[float]  # samples generated so far
    score: list[float]  # share of right held-out responses, sampled
    length: list[float]  # mean tokens per held-out response
    entropy: list[float]  # nats per token of the last rollout

    def at(self, name: str, samples: float) -> float:
        """Return a curve's value after this many samples, by linear interpolation between evaluations."""
        return float(np.interp(samples, self.samples, getattr(self, name)))

    def mean_score(self, budget: float) -> float:
        """Return the mean score over the first `budget` samples. It grows with the gain and with its speed."""
        x = [*(n for n in self.samples if n < budget), budget]
        return float(np.trapezoid([self.at("score", n) for n in x], x) / budget)

    def figures(self, budget: float) -> Figures:
        """Return the compared figures after `budget` samples."""
        ends = {name: self.at(name, budget) for name in ("score", "length", "entropy")}
        return {"mean_score": self.mean_score(budget), "samples_to_target": self.samples_to_target()} | ends

    def samples_to_target(self) -> float | None:
        for (start, low), (end, high) in pairwise(zip(self.samples, self.score, strict=True)):
            if low < TARGET <= high:
                return start + (end - start) * (TARGET - low) / (high - low)
        return None


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("out", type=user_path, nargs="?", metavar="OUT")
    fit = sorted(set(RECIPES) - set(UNFIT))
    parser.add_argument("--methods", nargs="+", choices=fit, default=list(METHODS), metavar="METHOD", help=", ".join(fit))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    options = parser.parse(arguments, steps=1)
    for name, values in (("methods", options.methods), ("seeds", options.seeds)):
        if len(set(values)) < len(values):
            parser.error(f"--{name}={' '.join(map(str, values))} must differ from one another")
    if min(options.seeds) < 0:
        parser.error(f"--seeds={min(options.seeds)} must not be negative")
    if options.out is not None:
        return _compare(options.out.resolve(), options.methods, options.steps, options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        first_and_last = list(dict.fromkeys((options.methods[0], options.methods[-1])))
        return _compare(Path(folder), first_and_last, min(options.steps, 20), options.seeds[:1])


def _compare(out: Path, methods: Sequence[str], steps: int, seeds: Sequence[int]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "task" / "heldout.jsonl").exists():  # this file is written last
        _call([sys.executable, str(HERE / "task.py"), str(out / "task")], out / "task.log", num_threads=2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda run: _train(out, run[0], run[1], steps), product(methods, seeds)))
    runs = {method: [_read(out / f"{method}-{seed}" / "metrics.jsonl") for seed in seeds] for method in methods}
    budget = min(run.samples[-1] for found in runs.values() for run in found)
    figures = {method: [run.figures(budget) for run in found] for method, found in runs.items()}
    print(_table(figures))
    _draw(runs, budget, out / "methods.png")
    result = {
        "target": TARGET,
        "samples": budget,
        "seeds": list(seeds),
        "separation": {n: separation([_column(f, n) for f in figures.values()]) for n in ("mean_score", "length", "entropy")},
        "methods": figures,  # one per seed
    }
    (out / "methods.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def separation(values: Sequence[Sequence[float]]) -> float | None:
    """Return the F ratio of a one-way analysis of variance (between methods / within); None with one seed or method.

    A ratio around 1 means that methods differ no more than the seeds of one method.
    """
    num_seeds = len(values[0])
    if num_seeds < 2 or len(values) < 2:
        return None
    within = mean(variance(row) for row in values)
    return num_seeds * variance([mean(row) for row in values]) / within if within else None


def _train(out: Path, method: str, seed: int, steps: int) -> None:
    """Train unless the run is finished."""
    run, task = out / f"{method}-{seed}", out / "task"
    if (run / "hf").exists():
        made = max(read_curves(run / "metrics.jsonl")["seconds/step"])
        if made != steps:
            raise SystemExit(f"{run} has {made} steps, not --steps={steps}; give another OUT, or that number")
        return
    overrides: dict[str, Any] = {"run_dir": run, "steps": steps, "seed": seed, "algorithm.recipe": method}
    overrides |= {
        "model.path": task / "model",
        "data.train": task / "train.jsonl",
        "data.heldout": task / "heldout.jsonl",
        **STEP_REWARDS.get(method, {}),
    }
    sets = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    resume = ["--resume"] if (run / "run.json").exists() else []
    command = [sys.executable, "-m", "grpo_mega.cli", "train", str(HERE / "task.yaml"), *sets, *resume]
    _call(command, out / f"{run.name}.log", num_threads=1)


def _call(command: list[str], log: Path, num_threads: int) -> None:
    print(f"+ {log.stem}", file=sys.stderr, flush=True)
    env = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    with log.open("ab") as output:
        code = subprocess.run(command, cwd=harness.ROOT, env=env, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{log.stem} ended with code {code}; see {log}, then continue with the same command")


def _read(metrics: Path) -> Run:
    curves, config = read_curves(metrics), load(HERE / "task.yaml")
    steps, rollouts = sorted(curves["seconds/step"]), curves.get("rollouts", {})
    # A step with dynamic sampling may need several rollouts.
    per_rollout = config.batch.prompts_per_step * config.algorithm.group_size
    generated = dict(zip(steps, accumulate(per_rollout * rollouts.get(step, 1) for step in steps), strict=True))
    scores = curves[f"eval/mean@{config.eval.samples}"]
    evaluated = sorted(scores)
    return Run(
        [generated.get(step, 0.0) for step in evaluated],
        [scores[step] for step in evaluated],
        [curves["eval/sampled_response_length"][step] for step in evaluated],
        [_last(curves["entropy/mean"], step) for step in evaluated],
    )


def _last(curve: Curve, step: int) -> float:
    """Return the last value at or before a step, or else the first value. A step without an update has no value."""
    return curve[max((s for s in curve if s <= step), default=min(curve))]


def _table(figures: Mapping[str, Sequence[Figures]]) -> str:
    lines = [f"| method | mean score | final score | samples to {TARGET} | length | entropy |", "|---|---|---|---|---|---|"]
    for method, found in sorted(figures.items(), key=lambda item: -mean(_column(item[1], "mean_score"))):
        reached = _column(found, "samples_to_target")
        missing = "" if len(reached) == len(found) else f", {len(reached)} of {len(found)} seeds"
        samples = _spread(reached, ",.0f") + missing if reached else "not reached"
        cells = [_spread(_column(found, name), form) for name, form in FORMS.items()]
        lines.append(f"| `{method}` | {' | '.join([*cells[:2], samples, *cells[2:]])} |")
    return "\n".join(lines)


def _column(figures: Sequence[Figures], name: str) -> list[float]:
    """Return a figure for each seed that has it."""
    return [value for figure in figures if (value := figure[name]) is not None]


def _spread(values: Sequence[float], form: str) -> str:
    """Format the mean and the range over seeds."""
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{mean(values):{form}}{ends}"


def _draw(runs: Mapping[str, Sequence[Run]], budget: float, picture: Path) -> None:
    """Draw the mean and the range over seeds of each curve."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    labels = {"score": "held-out score, sampled", "length": "response length, tokens", "entropy": "entropy, nats per token"}
    x = np.linspace(0, budget, 41)
    for axes, (name, label) in zip(panels, labels.items(), strict=True):
        for number, (method, found) in enumerate(runs.items()):
            values = np.array([[run.at(name, n) for n in x] for run in found])
            axes.plot(x, values.mean(0), color=f"C{number}", label=method)
            axes.fill_between(x, values.min(0), values.max(0), color=f"C{number}", alpha=0.12, linewidth=0)
        axes.set(xlabel="samples generated", ylabel=label)
        axes.grid(alpha=0.2)
    panels[0].axhline(TARGET, color="0.6", linewidth=0.8, linestyle=":")
    panels[0].legend(loc="lower right", frameon=False)
    figure.savefig(picture, dpi=80, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    harness.start(main)
