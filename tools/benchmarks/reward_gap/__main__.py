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

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/reward_gap`

from grpo_mega.observe.curves import Curve, read_curves
from grpo_mega.paths import user_path
from grpo_mega.rewards import BUILT_IN
from tools.benchmarks import harness

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
LIMIT = 0.01
TASKS = {"tagged": ROOT / "examples" / "arithmetic.py", "bare": HERE / "task.py"}
ANSWERS = ("accuracy", "len", "cosine")  # rewards that pay for answers
# Not trained on: oracles, and a reward that needs a server.
WATCHED = ("arithmetic_oracle", "word_sums_oracle", "reward_model")
REWARDS = tuple(sorted(set(BUILT_IN) - set(WATCHED), key=lambda name: (name not in ANSWERS, name)))
GAP = "reward/paid_but_wrong"


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


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("out", type=user_path, nargs="?", metavar="OUT")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--rewards", nargs="+", choices=REWARDS, default=list(REWARDS), metavar="REWARD", help=", ".join(REWARDS)
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--unevaluated", action="store_true")
    options = parser.parse(arguments, steps=1)
    if options.out is not None:
        runs = [*product(options.tasks, options.rewards)]
        return measure(options.out.resolve(), runs, options.steps, options.unevaluated)
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), [(task, "accuracy") for task in options.tasks], options.steps, options.unevaluated)


def measure(out: Path, runs: Sequence[tuple[str, str]], steps: int, unevaluated: bool) -> int:
    """Run these tasks and rewards, print their gaps, and return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    gaps: dict[str, Gap] = {}
    for task, reward in runs:
        if not (out / task / "sft" / "hf").exists():  # this folder is written last
            print(f"+ {task}", file=sys.stderr, flush=True)
            paths = {"run_dir": "sft", "model.path": "model", "data.train": "sft.jsonl"}
            settings = [f"--set={key}={out / task / name}" for key, name in paths.items()]
            sft = ["-m", "grpo_mega.cli", "sft", str(ROOT / "examples" / "quickstart_sft.yaml"), *settings]
            for program in ([str(TASKS[task]), str(out / task)], sft):
                if subprocess.run([sys.executable, *program]).returncode:
                    raise harness.RunFailed(f"{program[0]} failed for {task}; see above")
        run = out / f"{task}-{reward}{'-unevaluated' if unevaluated else ''}"
        print(f"+ {run.name}", file=sys.stderr, flush=True)
        train(run, out / task, reward, steps, unevaluated)
        gaps[run.name] = gap_of(read_curves(run / "metrics.jsonl"), "accuracy" if reward not in ANSWERS else reward)
    is_within = all(gap.is_within for gap in gaps.values())
    result = {"limit": LIMIT, "is_within": is_within, "runs": {name: asdict(gap) for name, gap in gaps.items()}}
    (out / "reward_gap.json").write_text(json.dumps(result) + "\n")
    rows = [("task and reward", "paid but wrong", "worst step", "paid, first step", "last step")]
    for name, gap in gaps.items():
        paid = f"{gap.paid_first:.2f}", f"{gap.paid_last:.2f}"
        rows.append((name, f"{gap.worst:.1%}", f"{gap.worst_step}", *paid))
    wrong = [f"{name} pays more than {LIMIT:.0%} wrong answers" for name, gap in gaps.items() if not gap.is_within]
    return harness.report(rows, result, problems=wrong)


def gap_of(curves: Mapping[str, Curve], judge: str) -> Gap:
    """Return the gap of a run. `judge` has the verdict "correct". Raise RunFailed if a step has no figure."""
    gap, trained = curves.get(GAP, {}), sorted(curves["seconds/step"])
    if missing := [step for step in trained if step not in gap]:
        raise harness.RunFailed(f"step {missing[0]} has no {GAP}; is arithmetic_oracle among rewards.functions?")
    paid = curves.get(f"verdict/{judge}/correct", {})
    if not paid:
        raise harness.RunFailed(f"{judge} called no response correct, so nothing was compared")
    worst = max(trained, key=lambda step: gap[step])
    return Gap(len(trained), gap[worst], worst, paid.get(trained[0], 0.0), paid.get(trained[-1], 0.0))


def functions_of(reward: str, unevaluated: bool) -> list[dict[str, object]]:
    """Return rewards.functions: the reward, accuracy if the reward does not judge answers, and the oracle."""
    needs_judge = reward not in ANSWERS or (unevaluated and reward != "accuracy")
    weights = {reward: 1.0, **({"accuracy": 0.0} if needs_judge else {}), "arithmetic_oracle": 0.0}
    options = {"options": {"unevaluated": True}} if unevaluated else {}
    return [
        {"name": name, "weight": weight} | (options if name == "accuracy" else {}) for name, weight in weights.items()
    ]


def train(run: Path, task: Path, reward: str, steps: int, unevaluated: bool) -> None:
    """Train unless the run is finished."""
    if (run / "hf").exists():
        made = max(read_curves(run / "metrics.jsonl")["seconds/step"])
        if made != steps:
            raise harness.RunFailed(f"{run} has {made} steps, not --steps={steps}; give another OUT, or that number")
        return
    settings: dict[str, object] = {
        "steps": steps,
        "layout": "{tp: 1}",
        "model.path": task / "sft" / "hf",
        "data.train": task / "train.jsonl",
        "data.heldout": task / "heldout.jsonl",
        "eval.interval": 0,
        "eval.num_prompts": 16,
        "log.samples_per_step": 256,  # log all samples, to inspect a gap in samples.jsonl
        "rewards.functions": json.dumps(functions_of(reward, unevaluated)),
    }
    if reward == "arithmetic_steps":
        settings |= {"algorithm.recipe": "process_supervision", "rewards.step_splitter": "lines"}
    harness.train(ROOT / "examples" / "quickstart.yaml", run, settings)


if __name__ == "__main__":
    harness.start(main)
