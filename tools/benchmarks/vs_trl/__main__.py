"""Compare our step with TRL's GRPOTrainer: the same model, prompts, group size, lengths, mini-batches and optimizer.

    python tools/benchmarks/vs_trl [--rounds 1] [--mean-length 24] [--prompts 2] [--mini-batches 1]

Two processes, TRL and ours, take turns on all cores; the other one waits idle. Each round has three turns. Two turns are
updates from given responses with a longest response of 8 times and 3 times the mean: rewards, advantages, old log-probs,
forward, backward and optimizer. The third is a whole step: each generates its own responses (TRL with transformers' generate,
ours with its embedded engine), scores and updates, and ours also syncs the weights to its engine. An extra first round only
compares losses and gradient norms. Figures are medians over rounds. Memory is the peak resident size in a turn, including
children.

The last line is JSON: update_ratio_8, update_ratio_3, step_ratio and memory_ratio (ours / TRL), loss_difference (absolute) and
norm_difference (relative). The exit code is 1 if a ratio is above its target or the losses differ, 2 for invalid arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from grpo_mega import console

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/vs_trl`

from tools.benchmarks import peers

ROOT = Path(__file__).resolve().parents[3]
TARGETS = {"update_ratio_8": 0.25, "update_ratio_3": 0.5, "step_ratio": 0.5, "memory_ratio": 0.5}
LOSS_TOLERANCE = 1e-4
TURNS = ({"kind": "update", "ratio": 8}, {"kind": "update", "ratio": 3}, {"kind": "step", "ratio": 0})
CHECK = TURNS[1]
NAMES = ("trl", "ours")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{message}; see --help\n")


class Contestant:
    """A process that performs one turn per request."""

    def __init__(self, name: str, task: str, options: argparse.Namespace) -> None:
        self.name = name
        self._log = Path(json.loads(task)["folder"]) / f"{name}.log"
        command = [sys.executable, str(Path(__file__).with_name("contestant.py")), name, task]
        command += [str(options.micro_batch), str(options.tokens_per_micro_batch)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"},
            )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            lines = [text for text in self._log.read_text().splitlines() if "Error" in text]
            raise SystemExit(
                f"{self.name} ended with code {self._process.wait()}: {lines[-1] if lines else 'no error in its log'}"
            )
        return dict(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    from tools.benchmarks.vs_trl.task import Task, write_task

    with tempfile.TemporaryDirectory() as folder:
        task = Task(
            folder=Path(folder),
            prompts=options.prompts,
            group_size=options.group_size,
            prompt_length=options.prompt_length,
            mean_length=options.mean_length,
            max_length=4 * options.mean_length,
            mini_batches=options.mini_batches,
            lr=1e-7,
            seed=options.seed,
        )
        parameters = write_task(task)
        contestants = [Contestant(name, task.to_json(), options) for name in NAMES]
        try:
            for contestant in contestants:
                contestant.answer()
            check = {c.name: c.ask(**CHECK, number=0) for c in contestants}
            rounds = [play(contestants, number) for number in range(1, options.rounds + 1)]
        finally:
            for contestant in contestants:
                contestant.close()
    found = summary(check, rounds) | {"parameters": parameters, "rounds": options.rounds, "mean_length": options.mean_length}
    print(table(rounds, found))
    missed = [name for name, target in TARGETS.items() if found[name] > target]
    if missed:
        print(f"short of the target: {', '.join(missed)}")
    print(json.dumps(found))
    return 1 if missed or found["loss_difference"] > LOSS_TOLERANCE else 0


def play(contestants: list[Contestant], number: int) -> list[dict[str, dict[str, Any]]]:
    """Return the answers by turn and contestant. The contestants alternate in going first."""
    order = contestants if number % 2 else contestants[::-1]
    return [{c.name: c.ask(**turn, number=number) for c in order} for turn in TURNS]


def summary(check: dict[str, dict[str, Any]], rounds: list[list[dict[str, dict[str, Any]]]]) -> dict[str, Any]:
    def ratio(turn: int) -> float:
        return round(statistics.median(r[turn]["ours"]["seconds"] / r[turn]["trl"]["seconds"] for r in rounds), 3)

    def peak(name: str) -> float:
        return max(float(turn[name]["peak"]) for r in rounds for turn in r)

    losses, norms = (list(zip(check["ours"][key], check["trl"][key], strict=True)) for key in ("losses", "norms"))
    return {
        "update_ratio_8": ratio(0),
        "update_ratio_3": ratio(1),
        "step_ratio": ratio(2),
        "memory_ratio": round(peak("ours") / peak("trl"), 3),
        "loss_difference": max(abs(a - b) for a, b in losses),
        "norm_difference": max(abs(a - b) / b for a, b in norms),
        "sampled_tokens": {n: statistics.median(r[2][n]["tokens"] for r in rounds) for n in NAMES},
        "longest_sampled": {n: statistics.median(r[2][n]["longest"] for r in rounds) for n in NAMES},
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "megatron-core")},
        "threads": os.cpu_count(),
    }


def table(rounds: list[list[dict[str, dict[str, Any]]]], found: dict[str, Any]) -> str:
    names = ("update, longest = 8 x mean", "update, longest = 3 x mean", "whole step")
    keys = ("update_ratio_8", "update_ratio_3", "step_ratio")
    lines = [f"{'':28}{'TRL s':>9}{'ours s':>9}{'ratio':>8}{'target':>8}{'TRL GiB':>9}{'ours GiB':>10}"]
    for turn, (name, key) in enumerate(zip(names, keys, strict=True)):
        seconds = [statistics.median(r[turn][n]["seconds"] for r in rounds) for n in NAMES]
        peaks = [max(r[turn][n]["peak"] for r in rounds) / 2**30 for n in NAMES]
        lines.append(
            f"{name:28}{seconds[0]:9.2f}{seconds[1]:9.2f}{found[key]:8.3f}{TARGETS[key]:8.2f}{peaks[0]:9.2f}{peaks[1]:10.2f}"
        )
    sampled = ", ".join(
        f"{name} {found['sampled_tokens'][name]:.0f} tokens, the longest {found['longest_sampled'][name]:.0f}" for name in NAMES
    )
    lines.append(f"memory ratio {found['memory_ratio']:.3f} (target {TARGETS['memory_ratio']}); sampled in a step: {sampled}")
    lines.append(
        f"same responses, same weights: losses differ by {found['loss_difference']:.1e}, "
        f"gradient norms by {found['norm_difference']:.1e} of their value"
    )
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="measured rounds; figures are medians over them")
    parser.add_argument("--prompts", type=int, default=2, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=16, help="in tokens")
    parser.add_argument("--mean-length", type=int, default=24, help="mean tokens per response; the maximum is 4 times this")
    parser.add_argument("--mini-batches", type=int, default=1, help="optimizer steps per step")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples per forward pass of TRL (its default)")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=2048, help="our micro-batch size")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    peers.require("trl")
    for name, value in vars(options).items():
        if name != "seed" and value < 1:
            parser.error(f"--{name.replace('_', '-')}={value} must be at least 1")
    if options.prompts % options.mini_batches:
        parser.error(f"--mini-batches={options.mini_batches} does not divide --prompts={options.prompts}")
    num_samples = options.prompts * options.group_size
    per_mini_batch = num_samples // options.mini_batches
    if per_mini_batch % min(options.micro_batch, per_mini_batch):
        parser.error(f"--micro-batch={options.micro_batch} does not divide a mini-batch of {per_mini_batch} samples")
    if num_samples < 10 or options.mean_length < 4:
        parser.error("a longest response of 8 times the mean needs 10 samples and --mean-length=4 at least")
    try:
        version("trl")
    except PackageNotFoundError:
        parser.error("trl is not installed; pip install 'grpo_mega[dev]'")
    return options


if __name__ == "__main__":
    console.install()
    sys.exit(main())
