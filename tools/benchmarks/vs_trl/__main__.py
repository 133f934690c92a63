"""Compare our step with TRL's GRPOTrainer: the same model, prompts, group size, lengths, mini-batches and optimizer.

    python tools/benchmarks/vs_trl [--rounds 1] [--mean-length 24] [--prompts 2] [--mini-batches 1]

Two processes, TRL and ours, take turns on all cores; the other one waits idle. Each round has three turns. Two turns
are updates from given responses with a longest response of 8 times and 3 times the mean: rewards, advantages, old
log-probs, forward, backward and optimizer. The third is a whole step: each generates its own responses (TRL with
transformers' generate, ours with its embedded engine), scores and updates, and ours also syncs the weights to its
engine. An extra first round only compares losses and gradient norms. Figures are medians over rounds. Memory is the
peak resident size in a turn, including children.

The last line is JSON: update_ratio_8, update_ratio_3, step_ratio and memory_ratio (ours / TRL), loss_difference
(absolute) and norm_difference (relative). The exit code is 1 if a ratio is above its target or the losses differ, 2 for
invalid arguments.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/vs_trl`

from tools.benchmarks import harness, peers

LIMITS = {
    "update_ratio_8": 0.25,
    "update_ratio_3": 0.5,
    "step_ratio": 0.5,
    "memory_ratio": 0.5,
    "loss_difference": 1e-4,
}
TURNS: dict[str, dict[str, Any]] = {
    "update_ratio_8": {"kind": "update", "ratio": 8},
    "update_ratio_3": {"kind": "update", "ratio": 3},
    "step_ratio": {"kind": "step", "ratio": 0},
}
TITLES = ("update, longest = 8 x mean", "update, longest = 3 x mean", "whole step")
FIGURES = ("seconds", "peak", "tokens", "longest")


class Contestant:
    """A process that performs one turn per request."""

    def __init__(self, name: str, task: str, micro_batch: int) -> None:
        self.name = name
        self._log = Path(json.loads(task)["folder"]) / f"{name}.log"
        command = [sys.executable, str(Path(__file__).with_name("contestant.py")), name, task, str(micro_batch)]
        path = os.pathsep.join([str(harness.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
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

    def variant(self, turn: dict[str, Any]) -> Callable[[], harness.Figures]:
        """Return a variant that performs a turn. Each round has different responses, equal for both contestants."""
        numbers = itertools.count(1)

        def act() -> harness.Figures:
            answer = self.ask(**turn, number=next(numbers))
            return {name: answer[name] for name in FIGURES if name in answer}

        return act

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="measured rounds; figures are medians over them")
    parser.add_argument("--prompts", type=int, default=2, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=16, help="in tokens")
    parser.add_argument(
        "--mean-length", type=int, default=24, help="mean tokens per response; the maximum is 4 times this"
    )
    parser.add_argument("--mini-batches", type=int, default=1, help="optimizer steps per step")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples per forward pass of TRL (its default)")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=2048, help="our micro-batch size")
    parser.add_argument("--seed", type=int, default=0)
    names = ("rounds", "prompts", "group_size", "prompt_length", "mean_length", "mini_batches", "micro_batch")
    options = parser.parse(arguments, **dict.fromkeys((*names, "tokens_per_micro_batch"), 1))
    peers.require("trl")
    if options.prompts % options.mini_batches:
        parser.error(f"--mini-batches={options.mini_batches} does not divide --prompts={options.prompts}")
    num_samples = options.prompts * options.group_size
    per_mini_batch = num_samples // options.mini_batches
    if per_mini_batch % min(options.micro_batch, per_mini_batch):
        parser.error(f"--micro-batch={options.micro_batch} does not divide a mini-batch of {per_mini_batch} samples")
    if num_samples < 10 or options.mean_length < 4:
        parser.error("a longest response of 8 times the mean needs 10 samples and --mean-length=4 at least")
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
        sizes = {"trl": options.micro_batch, "ours": options.tokens_per_micro_batch}
        contestants = [Contestant(name, task.to_json(), size) for name, size in sizes.items()]
        try:
            for contestant in contestants:
                contestant.answer()
            check = {c.name: c.ask(**TURNS["update_ratio_3"], number=0) for c in contestants}
            variants = {f"{turn}/{c.name}": c.variant(request) for turn, request in TURNS.items() for c in contestants}
            rounds = harness.take_turns(variants, options.rounds)
        finally:
            for contestant in contestants:
                contestant.close()
    about = {"parameters": parameters, "rounds": options.rounds, "mean_length": options.mean_length}
    return report(check, rounds, about)


def report(check: dict[str, dict[str, Any]], rounds: dict[str, list[harness.Figures]], about: dict[str, Any]) -> int:
    found = harness.medians(rounds)
    peaks = {name: max(one["peak"] for one in all_) for name, all_ in rounds.items()}
    ratios = {turn: found[f"{turn}/ours"]["seconds"] / found[f"{turn}/trl"]["seconds"] for turn in TURNS}
    memory = [max(peak for variant, peak in peaks.items() if variant.endswith(name)) for name in ("/ours", "/trl")]
    losses, norms = (list(zip(check["ours"][key], check["trl"][key], strict=True)) for key in ("losses", "norms"))
    result: dict[str, Any] = {name: round(ratio, 3) for name, ratio in ratios.items()} | {
        "memory_ratio": round(memory[0] / memory[1], 3),
        "loss_difference": max(abs(a - b) for a, b in losses),
        "norm_difference": max(abs(a - b) / b for a, b in norms),
        "sampled_tokens": {name: found[f"step_ratio/{name}"]["tokens"] for name in ("trl", "ours")},
        "longest_sampled": {name: found[f"step_ratio/{name}"]["longest"] for name in ("trl", "ours")},
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "megatron-core")},
        "threads": os.cpu_count(),
    }
    rows: list[Sequence[str]] = [("", "TRL s", "ours s", "ratio", "target", "TRL GiB", "ours GiB")]
    for title, turn in zip(TITLES, TURNS, strict=True):
        seconds = [f"{found[f'{turn}/{name}']['seconds']:.2f}" for name in ("trl", "ours")]
        gib = [f"{peaks[f'{turn}/{name}'] / 2**30:.2f}" for name in ("trl", "ours")]
        rows.append((title, *seconds, f"{result[turn]:.3f}", f"{LIMITS[turn]:.2f}", *gib))
    sampled = (
        f"{name} {result['sampled_tokens'][name]:.0f} tokens, the longest {n:.0f}"
        for name, n in result["longest_sampled"].items()
    )
    print(f"sampled in a step: {', '.join(sampled)}")
    print(
        f"same responses, same weights: losses differ by {result['loss_difference']:.1e}, "
        f"gradient norms by {result['norm_difference']:.1e} of their value"
    )
    return harness.report(rows, result | about, limits=LIMITS)


if __name__ == "__main__":
    harness.start(main)
