"""Repeat two published comparisons in miniature: DAPO's six rows, and Dr. GRPO's growth of wrong answers.

    python tools/benchmarks/methods [OUT] [--seeds 0 1 2] [--steps 32] [--dr-steps 32] [--picture FILE]

All runs start from one small model of chains of additions (task.py). DAPO's rows (arXiv 2503.14476, table 1) add one
setting after another to GRPO under a tight limit of length. Dr. GRPO (arXiv 2503.20783, figure 5) is compared with GRPO
under a loose limit: the mean length of wrong responses. The benchmark writes OUT/task, OUT/NAME-SEED (one run each),
OUT/methods.png and OUT/methods.json. It prints a table, and the JSON as the last line. It skips finished runs, so the
same command continues an interrupted comparison. Without OUT it runs the first and the last row with one seed and 8
steps in a temporary folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/methods`

from grpo_mega.observe.curves import read_curves
from grpo_mega.paths import METRICS_FILE, SAMPLES_FILE, user_path
from grpo_mega.text import read_json_lines
from tools.benchmarks import harness
from tools.benchmarks.methods import task

HERE = Path(__file__).resolve().parent
ADDED: dict[str, dict[str, object]] = {  # each row of DAPO's table adds these settings to the rows before it
    "naive GRPO": {},
    "+ overlong filter": {"algorithm.overlong_filter": "true"},
    "+ clip-higher": {"algorithm.ratio_clip_eps_high": 0.28},
    "+ soft overlong": {"algorithm.overlong_buffer": 0.2},
    "+ token-level": {"algorithm.loss_agg_func": "token-mean"},
    "+ dynamic sampling": {"algorithm.dynamic_sampling_tries": 4},
}
ROWS = tuple(ADDED)
DR_ROWS: dict[str, dict[str, object]] = {  # the keys of the recipe dr_grpo, which the quickstart's file would override
    "GRPO": {},
    "Dr. GRPO": {"algorithm.normalize_by_std": "false", "algorithm.loss_agg_func": "seq-mean-token-sum-norm"},
}
SETTINGS: dict[str, object] = {
    "layout": "{tp: 1}",
    "algorithm.kl_beta": 0,
    "algorithm.calculate_entropy": "true",
    "rewards.functions": "[{name: accuracy, weight: 1.0}]",
    "batch.prompts_per_step": 16,
    "batch.mini_batches": 4,
    "optimizer.lr": 1.5e-4,
    "eval.num_prompts": 128,
    "eval.greedy": "false",  # a greedy response may depend on one near tie
    "eval.samples": 2,
    "log.samples_per_step": 512,
    "log.report_interval": 0,
}
SCORE = "eval/mean@2"
LAST = 4  # figures of a run's end are means over this many steps
FORMS = {"score": ".3f", "cut": ".3f", "samples": ",.0f", "entropy": ".3f", "wrong": ".1f"}


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("out", type=user_path, nargs="?", metavar="OUT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--steps", type=int, default=32, help="of DAPO's rows")
    parser.add_argument("--dr-steps", type=int, default=32, help="of GRPO and Dr. GRPO")
    parser.add_argument("--picture", type=user_path, help="instead of OUT/methods.png")
    options = parser.parse(arguments, steps=1, dr_steps=1)
    if options.out is not None:
        names = (*ROWS, *DR_ROWS)
        return compare(options.out.resolve(), names, options.seeds, options.steps, options.dr_steps, options.picture)
    with tempfile.TemporaryDirectory() as folder:
        steps = min(options.steps, 8)
        return compare(Path(folder), (ROWS[0], ROWS[-1]), options.seeds[:1], steps, steps, options.picture)


def compare(
    out: Path, names: Sequence[str], seeds: Sequence[int], steps: int, dr_steps: int, picture: Path | None
) -> int:
    """Run these rows with these seeds, print their figures, and return the exit code."""
    make_start(out)
    curves: dict[str, list[dict[str, dict[int, float]]]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            print(f"+ {name}, seed {seed}", file=sys.stderr, flush=True)
            curves[name].append(train(out, name, seed, steps if name in ROWS else dr_steps))
    figures = {name: [figures_of(one) for one in found] for name, found in curves.items()}
    draw(curves, picture or out / "methods.png")
    rows: list[Sequence[str]] = [
        ("row", "held-out score", "cut", "samples", "entropy", "length of wrong responses, tokens")
    ]
    for name, found in figures.items():
        rows.append((name, *(spread([one[key] for one in found], form) for key, form in FORMS.items())))
    result = {"seeds": list(seeds), "steps": steps, "dr_steps": dr_steps, "rows": figures}
    (out / "methods.json").write_text(json.dumps(result) + "\n")
    return harness.report(rows, result)


def make_start(out: Path) -> None:
    """Make the model that all runs start from, unless it is there."""
    if (out / "task" / "sft" / "hf").exists():  # this folder is written last
        return
    paths = {"run_dir": "sft", "model.path": "model", "data.train": "sft.jsonl"}
    settings = [f"--set={key}={out / 'task' / name}" for key, name in paths.items()]
    sft = ["-m", "grpo_mega.cli", "sft", str(harness.ROOT / "examples" / "quickstart_sft.yaml"), *settings]
    for program in ([str(HERE / "task.py"), str(out / "task")], [*sft, "--set=data.max_length=128"]):
        if subprocess.run([sys.executable, *program], stdout=sys.stderr).returncode:
            raise harness.RunFailed(f"{program[0]} failed; see above")


def settings_of(name: str) -> dict[str, object]:
    """Return the settings of a row, in addition to SETTINGS."""
    if name in DR_ROWS:
        return {"rollout.max_response_length": task.LOOSE} | DR_ROWS[name]
    rows = [ADDED[row] for row in ROWS[: ROWS.index(name) + 1]]
    return {"rollout.max_response_length": task.TIGHT} | {key: value for row in rows for key, value in row.items()}


def train(out: Path, name: str, seed: int, steps: int) -> dict[str, dict[int, float]]:
    """Train unless the run is finished. Return its curves, with the mean length of wrong responses."""
    run = out / f"{name.replace('+', '').replace('.', '').strip().replace(' ', '-').lower()}-{seed}"
    if not (run / "hf").exists():
        start, paths = (
            out / "task",
            {"model.path": "sft/hf", "data.train": "train.jsonl", "data.heldout": "heldout.jsonl"},
        )
        settings = {"steps": steps, "seed": seed, "eval.interval": max(1, steps // 4), **SETTINGS, **settings_of(name)}
        settings |= {key: start / path for key, path in paths.items()}
        harness.train(harness.ROOT / "examples" / "quickstart.yaml", run, settings)
    curves = read_curves(run / METRICS_FILE)
    made = max(curves["seconds/step"])
    if made != steps:
        raise harness.RunFailed(f"{run} has {made} steps, not {steps}; give another OUT, or that number")
    return curves | {"wrong_length": wrong_lengths([row for _, row in read_json_lines(run / SAMPLES_FILE) if row])}


def wrong_lengths(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the mean number of tokens of the responses without a reward for accuracy, by step."""
    lengths: dict[int, list[int]] = {}
    for row in rows:
        if row["rewards"].get("accuracy") == 0:
            lengths.setdefault(row["step"], []).append(len(row["rollout_logprobs"]))
    return {step: mean(found) for step, found in lengths.items()}


def figures_of(curves: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return a run's last score, and the other figures at its end."""
    steps = sorted(curves["seconds/step"])
    per_rollout = 16 * 8  # prompts and samples of each

    def at_end(name: str) -> float:
        return mean([value for step, value in sorted(curves[name].items()) if step <= steps[-1]][-LAST:])

    return {
        "score": curves[SCORE][max(curves[SCORE])],
        "cut": at_end("response_length/cut"),
        "samples": sum(per_rollout * curves.get("rollouts", {}).get(step, 1) for step in steps),
        "entropy": at_end("entropy/mean"),
        "wrong": at_end("wrong_length"),
    }


def spread(values: Sequence[float], form: str) -> str:
    """Format the mean and the range over seeds."""
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{mean(values):{form}}{ends}"


def draw(curves: Mapping[str, Sequence[Mapping[str, Mapping[int, float]]]], picture: Path) -> None:
    """Draw the mean and the range over seeds: scores and cut responses of DAPO's rows, wrong responses of the pair."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("DAPO's rows: held-out score", SCORE, ROWS),
        ("DAPO's rows: share of cut responses", "response_length/cut", ROWS),
        ("length of wrong responses, tokens", "wrong_length", tuple(DR_ROWS)),
    )
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for panel, (title, metric, names) in zip(axes, panels, strict=True):
        for number, name in enumerate(name for name in names if name in curves):
            steps = sorted(set.intersection(*(set(one[metric]) for one in curves[name])))
            values = [[one[metric][step] for one in curves[name]] for step in steps]
            panel.plot(steps, [mean(row) for row in values], color=f"C{number}", label=name)
            panel.fill_between(steps, [*map(min, values)], [*map(max, values)], color=f"C{number}", alpha=0.1)
        panel.set(title=title, xlabel="step")
        panel.grid(alpha=0.2)
        if panel.lines:
            panel.legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=80, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    harness.start(main)
