"""Measure all figures that need a GPU: `python tools/benchmarks/gpu`, on a machine with one.

 mfu       MFU of a training step, in bf16 and FP8, and what recomputation costs (mfu.py)
 logprobs  time and memory of log-probs at 32k tokens x 152k vocabulary         (logprobs.py)
 engine    sleep, wake and sync of an SGLang server with the shape of a 4B model (engine.py)
 turns     multi-turn rollouts of a server, compared with single responses      (turns.py)
 memory    copies from host memory, and memory lost to fragmentation            (memory.py)
 step      a whole GRPO step by phase, from a run of the trainer                (step.py)
           also the free memory of the device in each phase, next to the plan's
 lora      the same step with an adapter                                        (lora.py)

--only mfu --profile profiles a step in bf16: the ten largest kernels, the time without a kernel, and the time with a
matrix product, as shares of the step (kernels.py). --only mfu --try NAME compares a step with the same step after a
change that is not in the config, because nobody has measured it (trials.py).

Each section runs in a separate process. It prints a line for each case that it skips because a package or memory is
missing. --only selects sections. --quick uses smaller batches and one model, and takes some minutes. --tiny uses tiny
sizes to try the code on any machine, even without a GPU; its figures mean nothing. At the end comes a Markdown table of
each figure with its target. The last line is JSON with date, card, versions, and rows of section, case, name, value,
unit, target, met (null without a target or a value) and note. Exit code 1 if a section failed, 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/gpu`

from grpo_mega.distributed.environment import library_environment
from tools.benchmarks import harness
from tools.benchmarks.gpu.rank import run_sections, value_text
from tools.benchmarks.gpu.trials import TRIALS

SECTIONS = ("mfu", "logprobs", "engine", "turns", "memory", "step", "lora")
PACKAGES = ("torch", "megatron-core", "transformer-engine", "sglang", "trl")
TITLES = ("section", "case", "figure", "value", "target", "")


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    options = parse(arguments)
    sections = options.only.split(",")
    os.environ.update(library_environment(os.environ))  # the variables of a rank
    parts = [in_child(group, options) for group in ([sections] if options.tiny else [[name] for name in sections])]
    rows, failed = [row for found, _ in parts for row in found], [name for _, wrong in parts for name in wrong]
    about = machine()
    print("\n".join(table(rows, about)))
    for section in failed:
        print(f"{section} failed, see above", file=sys.stderr)
    print(json.dumps(about | {"rows": rows, "failed": failed, "tiny": options.tiny, "quick": options.quick}))
    return int(bool(failed))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = harness.Parser(__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"sections among {','.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="smaller batches and one model")
    parser.add_argument("--tiny", action="store_true", help="try the code; its figures mean nothing")
    parser.add_argument("--profile", action="store_true", help="with --only mfu: the kernels of one step")
    parser.add_argument("--try", dest="trial", metavar="NAME", default="", help=f"with --only mfu: {', '.join(TRIALS)}")
    options = parser.parse(arguments)
    if unknown := [name for name in options.only.split(",") if name not in SECTIONS]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(SECTIONS)}")
    if (options.profile or options.trial) and options.only != "mfu":
        parser.error("--profile and --try need --only mfu")
    if options.trial and options.trial not in TRIALS:
        parser.error(f"--try: {options.trial!r} is none of {', '.join(TRIALS)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here; use one, or --tiny to try the code")
    return options


def in_child(sections: list[str], options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Run sections in a child process. Return rows, and the sections that failed."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        try:
            more = options.profile, options.trial
            return child.submit(run_sections, sections, options.quick, options.tiny, *more).result()
        except BrokenExecutor:  # the process died
            return [], sections


def machine() -> dict[str, Any]:
    """Return date, card and versions."""
    versions = {one.name: one.version for one in distributions() if one.name in PACKAGES}
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"date": datetime.date.today().isoformat(), "card": card, "versions": versions}


def table(rows: list[dict[str, Any]], about: dict[str, Any]) -> list[str]:
    """Return the lines of the Markdown table."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    lines = [f"\n{about['card']}, {about['date']}; {versions}\n", _line(*TITLES), _line(*["---"] * len(TITLES))]
    verdicts = {True: "met", False: "missed", None: ""}
    for row in rows:
        value = value_text(row["value"], row["unit"])
        sign = "at most" if row["better"] == "less" else "at least"
        target = "" if row["target"] is None else f"{sign} {row['target']:g} {row['unit']}"
        name = f"{row['name']} ({row['note']})" if row["note"] else row["name"]
        lines.append(_line(row["section"], row["case"], name, value, target, verdicts[row["met"]]))
    return lines


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    harness.start(main)
