"""Write FOLDER/report.md and report.json from the results of tools/first_day.sh in FOLDER: every figure with its
target.

Prints the table. The exit code is 1 if a part failed, or if the run broke a rule that must hold on any machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from grpo_mega.paths import user_path
from grpo_mega.text import filter_output

MOST_K3 = 0.01  # nats per token between trainer and engine; emulated FP8 kernels with a bf16 engine stay below 0.002
MOST_OF_PLAN = 1.5  # a step may take this many times the plan's estimate
REPEATED = ("loss/", "grad_norm", "reward/", "mismatch/", "kl/", "response_length/")  # equal in runs with the same bits

Row = dict[str, Any]  # part, name, value, target, met (None without a target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=user_path)
    parser.add_argument(
        "--same", type=user_path, metavar="RUN", help="compare the figures of two runs of one step instead"
    )
    options = parser.parse_args()
    folder = options.folder
    if options.same is not None:
        return compare(folder, options.same)
    parts = read_lines(folder / "steps.jsonl")
    bench, plan = last_json(folder / "benchmarks.log"), last_json(folder / "plan.log")
    rows = [row_of("parts", p["name"], f"code {p['code']}, {p['seconds']} s", "code 0", p["code"] == 0) for p in parts]
    failed = [row["name"] for row in rows if not row["met"]]
    run = run_rows(read_lines(folder / "run" / "metrics.jsonl"), plan, has_gpu=not bench.get("tiny", True))
    failed += [row["name"] for row in run if row["met"] is False and row["part"] == "run"]
    rows += run + [benchmark_row(found) for found in bench.get("rows", [])]
    text = render(rows, bench, folder)
    (folder / "report.md").write_text(text, encoding="utf-8")
    about = {name: bench.get(name) for name in ("date", "card", "versions")}
    found = json.dumps(about | {"rows": rows, "failed": failed}, indent=1)
    (folder / "report.json").write_text(found, encoding="utf-8")
    print(text)
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {folder}", file=sys.stderr)
    return 1 if failed else 0


def compare(first: Path, second: Path) -> int:
    """Print the figures of two runs that differ, without times and memory. Return 1 if there are any."""
    rows = [[row for row in read_lines(run / "metrics.jsonl") if "loss/total" in row] for run in (first, second)]
    if not rows[0] or len(rows[0]) != len(rows[1]):
        print(f"steps: {len(rows[0])} and {len(rows[1])}; both runs must have the same number, at least 1")
        return 1
    differing = [
        f"step {number}: {name} is {a.get(name)} and {b.get(name)}"
        for number, (a, b) in enumerate(zip(*rows, strict=True), 1)
        for name in sorted(a.keys() | b.keys())
        if name.startswith(REPEATED) and a.get(name) != b.get(name)
    ]
    print("\n".join(differing) or "both runs have the same figures")
    return int(bool(differing))


def run_rows(metrics: list[dict[str, Any]], plan: dict[str, Any], *, has_gpu: bool) -> list[Row]:
    """Return rows of the run: part "run" has rules for any machine, part "speed" has the step time."""
    steps = [row for row in metrics if "seconds/step" in row]
    if not steps:
        return [row_of("run", "steps", "none", "at least 1", False)]
    k3 = max(row["mismatch/k3"] for row in steps)
    num_gradients = sum(row["grad_norm"] > 0 for row in steps)
    rewards = f"{steps[0]['reward/mean']:.3f} to {steps[-1]['reward/mean']:.3f}"
    seconds = statistics.median(row["seconds/step"] for row in steps[1:] or steps)
    expected = plan.get("step_seconds") if has_gpu else None
    most = f"at most {MOST_OF_PLAN} x the plan's {expected:.1f}" if expected else None
    is_fast = seconds <= MOST_OF_PLAN * expected if expected else None
    return [
        row_of("run", "steps", len(steps), None, None),
        row_of("run", "largest mismatch/k3, nats per token", k3, f"at most {MOST_K3}", k3 <= MOST_K3),
        row_of("run", "steps with a gradient", num_gradients, "at least 1", num_gradients > 0),
        row_of("run", "reward, first to last", rewards, None, None),
        row_of("speed", "median step, s", seconds, most, is_fast),
    ]


def benchmark_row(found: dict[str, Any]) -> Row:
    """Convert a row of tools/benchmarks/gpu to a row of this report."""
    sign = "at most" if found["better"] == "less" else "at least"
    target = None if found["target"] is None else f"{sign} {found['target']:g} {found['unit']}"
    value = "none here" if found["value"] is None else f"{found['value']:.4g} {found['unit']}"
    return row_of(found["section"], f"{found['name']}, {found['case']}", value, target, found["met"])


def row_of(part: str, name: str, value: object, target: str | None, met: bool | None) -> Row:
    return {"part": part, "name": name, "value": value, "target": target, "met": met}


def render(rows: list[Row], bench: dict[str, Any], folder: Path) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in (bench.get("versions") or {}).items())
    lines = [f"# First day: {bench.get('card', 'unknown card')}, {bench.get('date', 'unknown date')}", "", versions, ""]
    if bench.get("tiny", True):
        lines += ["Tiny sizes, or no benchmarks: these figures say nothing about a card.", ""]
    lines += ["| part | figure | value | target | |", "|---|---|---|---|---|"]
    verdicts = {True: "met", False: "**missed**", None: ""}
    for row in rows:
        value = f"{row['value']:.4g}" if isinstance(row["value"], float) else row["value"]
        lines.append(f"| {row['part']} | {row['name']} | {value} | {row['target'] or ''} | {verdicts[row['met']]} |")
    return "\n".join([*lines, "", f"Logs, metrics and the run's report.html are in {folder}.", ""])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file with one per line; an empty list if there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line] if path.exists() else []


def last_json(path: Path) -> dict[str, Any]:
    """Return the last JSON object at the start of a line of a log; {} if there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    starts = [number for number, line in enumerate(lines) if line.startswith("{")]
    return dict(json.JSONDecoder().raw_decode("\n".join(lines[starts[-1] :]))[0]) if starts else {}


if __name__ == "__main__":
    filter_output()
    sys.exit(main())
