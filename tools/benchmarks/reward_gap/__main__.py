"""Train small models of sums with each built-in reward, and compare the paid responses with a strict oracle of the
task.

    python tools/benchmarks/reward_gap [OUT] [--tasks tagged bare] [--rewards accuracy len ...] [--steps 30]
    [--unevaluated]

A response is paid if the accuracy reward calls it correct, alone or inside `len` and `cosine`. It is wrong if
examples/arithmetic_oracle.py calls it wrong. The gap is the share of paid responses that are wrong. It must be at most
1% in every step of every run; otherwise the exit code is 1. The other built-in rewards do not pay for answers. Policies
train on them, and the accuracy reward judges with weight 0, so their gap shows accuracy on responses shaped by another
reward. The task `tagged` is the quickstart's. In `bare` (task.py) responses have no tags, and some stop before the
result of the last sum. `--unevaluated` lets accuracy accept these responses. It checks the benchmark itself, because
the benchmark must report them.

The benchmark writes OUT/TASK (model and data), OUT/TASK-REWARD (one run each) and OUT/reward_gap.json. It prints a
table, and the JSON as the last line. It skips finished runs. Without OUT it runs `accuracy` on both tasks in a
temporary folder, in two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import NoReturn

from grpo_mega import console
from grpo_mega.observe.curves import Curve, read_curves
from grpo_mega.paths import user_path
from grpo_mega.rewards import BUILT_IN

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIMIT = 0.01
TASKS = {"tagged": ROOT / "examples" / "arithmetic.py", "bare": HERE / "task.py"}
ANSWERS = ("accuracy", "len", "cosine")  # rewards that pay for answers
# Not trained on: oracles, and a reward that needs a server.
WATCHED = ("arithmetic_oracle", "word_sums_oracle", "reward_model")
REWARDS = tuple(sorted(set(BUILT_IN) - set(WATCHED), key=lambda name: (name not in ANSWERS, name)))
GAP = "reward/paid_but_wrong"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


@dataclass(frozen=True)
class Gap:
    """The worst step of a run, and the share of paid responses in its first and last step."""

    steps: int
    worst: float
    worst_step: int
    paid_first: float
    paid_last: float

    @property
    def is_within(self) -> bool:
        return self.worst <= LIMIT


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    runs = list(product(options.tasks, options.rewards))
    if options.out is not None:
        return measure(options.out.resolve(), runs, options.steps, options.unevaluated)
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), [(task, "accuracy") for task in options.tasks], options.steps, options.unevaluated)


def measure(out: Path, runs: Sequence[tuple[str, str]], steps: int, unevaluated: bool) -> int:
    """Run these tasks and rewards, print their gaps, and return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(task for task, _ in runs):
        if not (out / task / "heldout.jsonl").exists():  # this file is written last
            _call([sys.executable, str(TASKS[task]), str(out / task)], out / f"{task}.log")
    gaps: dict[str, Gap] = {}
    for task, reward in runs:
        run = out / f"{task}-{reward}{'-unevaluated' if unevaluated else ''}"
        _train(run, out / task, reward, steps, unevaluated)
        gaps[run.name] = gap_of(read_curves(run / "metrics.jsonl"), "accuracy" if reward not in ANSWERS else reward)
    print(_table(gaps))
    result = {"limit": LIMIT, "is_within": all(gap.is_within for gap in gaps.values())}
    text = json.dumps(result | {"runs": {name: asdict(gap) for name, gap in gaps.items()}})
    (out / "reward_gap.json").write_text(text + "\n")
    print(text)
    return 0 if result["is_within"] else 1


def gap_of(curves: Mapping[str, Curve], judge: str) -> Gap:
    """Return the gap of a run. `judge` is the reward with the verdict "correct". Raise SystemExit if a step has no
    figure.
    """
    gap, trained = curves.get(GAP, {}), sorted(curves["seconds/step"])
    if missing := [step for step in trained if step not in gap]:
        raise SystemExit(f"step {missing[0]} has no {GAP}; is arithmetic_oracle among rewards.functions?")
    paid = curves.get(f"verdict/{judge}/correct", {})
    if not paid:
        raise SystemExit(f"{judge} called no response correct, so nothing was compared")
    worst = max(trained, key=lambda step: gap[step])
    return Gap(len(trained), gap[worst], worst, paid.get(trained[0], 0.0), paid.get(trained[-1], 0.0))


def functions_of(reward: str, unevaluated: bool) -> list[dict[str, object]]:
    """Return rewards.functions: the reward, accuracy as the judge if the reward does not judge answers, and the
    oracle.
    """
    functions: list[dict[str, object]] = [{"name": reward, "weight": 1.0}]
    if reward not in ANSWERS or (unevaluated and reward != "accuracy"):
        functions.append({"name": "accuracy", "weight": 0.0})
    for function in functions:
        if function["name"] == "accuracy" and unevaluated:
            function["options"] = {"unevaluated": True}
    return [*functions, {"name": "arithmetic_oracle", "weight": 0.0}]


def _train(run: Path, task: Path, reward: str, steps: int, unevaluated: bool) -> None:
    """Train unless the run is finished."""
    if (run / "hf").exists():
        made = max(read_curves(run / "metrics.jsonl")["seconds/step"])
        if made != steps:
            raise SystemExit(f"{run} has {made} steps, not --steps={steps}; give another OUT, or that number")
        return
    overrides: dict[str, object] = {
        "run_dir": run,
        "steps": steps,
        "layout": "{tp: 1}",
        "model.path": task / "model",
        "data.train": task / "train.jsonl",
        "data.heldout": task / "heldout.jsonl",
        "eval.interval": 0,
        "eval.num_prompts": 16,
        "log.samples_per_step": 256,  # log all samples, to inspect a gap in samples.jsonl
        "rewards.functions": json.dumps(functions_of(reward, unevaluated)),
    }
    if reward == "arithmetic_steps":
        overrides |= {"algorithm.recipe": "process_supervision", "rewards.step_splitter": "lines"}
    sets = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    resume = ["--resume"] if (run / "run.json").exists() else []
    command = [
        sys.executable,
        "-m",
        "grpo_mega.cli",
        "train",
        str(ROOT / "examples" / "quickstart.yaml"),
        *sets,
        *resume,
    ]
    _call(command, run.with_suffix(".log"))


def _call(command: list[str], log: Path) -> None:
    print(f"+ {log.stem}", file=sys.stderr, flush=True)
    with log.open("ab") as output:
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output
        ).returncode
    if code:
        raise SystemExit(f"{log.stem} ended with code {code}; see {log}, then continue with the same command")


def _table(gaps: Mapping[str, Gap]) -> str:
    lines = ["| task and reward | paid but wrong, worst step | paid, first to last step |", "|---|---|---|"]
    for name, gap in gaps.items():
        lines.append(
            f"| {name} | {gap.worst:.1%} (step {gap.worst_step}) | {gap.paid_first:.2f} to {gap.paid_last:.2f} |"
        )
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=user_path, nargs="?", metavar="OUT")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--rewards", nargs="+", choices=REWARDS, default=list(REWARDS), metavar="REWARD", help=", ".join(REWARDS)
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--unevaluated", action="store_true")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps={options.steps} must be at least 1")
    return options


if __name__ == "__main__":
    console.filter_output()
    sys.exit(main())
