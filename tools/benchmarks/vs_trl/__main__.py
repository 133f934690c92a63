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

import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python tools/benchmarks/vs_trl`

from tools.benchmarks import harness

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
    """A process that performs one turn per request. Its output goes to its log."""

    def __init__(self, name: str, task: Any, micro_batch: int) -> None:
        from tools.benchmarks.vs_trl import contestant

        self.name, self._log = name, task.folder / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=contestant.run, args=(name, task, theirs, micro_batch, self._log))
        self._process.start()
        theirs.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        self._channel.send(request)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        try:
            return dict(self._channel.recv())
        except EOFError:
            self._process.join()
            lines = [text for text in self._log.read_text().splitlines() if "Error" in text]
            reason = lines[-1] if lines else "no error in its log"
            raise harness.RunFailed(f"{self.name} ended with code {self._process.exitcode}: {reason}") from None

    def variant(self, turn: dict[str, Any]) -> Callable[[], harness.Figures]:
        """Return a variant that performs a turn. Each round has different responses, equal for both contestants."""
        numbers = itertools.count(1)

        def act() -> harness.Figures:
            answer = self.ask(**turn, number=next(numbers))
            return {name: answer[name] for name in FIGURES if name in answer}

        return act

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended
            self._channel.send(None)
        self._process.join(30)
        self._process.kill()


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="measured rounds; figures are medians over them")
    parser.add_argument("--prompts", type=int, default=2, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=16, help="in tokens")
    parser.add_argument("--mean-length", type=int, default=24, help="tokens per response; at most 4 times as many")
    parser.add_argument("--mini-batches", type=int, default=1, help="optimizer steps per step")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples per forward pass of TRL (its default)")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=2048, help="our micro-batch size")
    parser.add_argument("--seed", type=int, default=0)
    names = ("rounds", "prompts", "group_size", "prompt_length", "mean_length", "mini_batches", "micro_batch")
    options = parser.parse(arguments, **dict.fromkeys((*names, "tokens_per_micro_batch"), 1))
    harness.require("trl")
    if options.prompts % options.mini_batches:
        parser.error(f"--mini-batches={options.mini_batches} does not divide --prompts={options.prompts}")
    num_samples = options.prompts * options.group_size
    per_mini_batch = num_samples // options.mini_batches
    if per_mini_batch % min(options.micro_batch, per_mini_batch):
        parser.error(f"--micro-batch={options.micro_batch} does not divide a mini-batch of {per_mini_batch} samples")
    if num_samples < 10 or options.mean_length < 4:
        parser.error("a longest response of 8 times the mean needs 10 samples and --mean-length=4 at least")
    from tools.benchmarks.vs_trl.task import Task, write_task

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        same = ("prompts", "group_size", "prompt_length", "mean_length", "mini_batches", "seed")
        sizes = {name: getattr(options, name) for name in same} | {"max_length": 4 * options.mean_length}
        task = Task(folder=Path(folder), lr=1e-7, **sizes)
        parameters = write_task(task)
        micro_batches = {"trl": options.micro_batch, "ours": options.tokens_per_micro_batch}
        contestants = [
            stack.enter_context(contextlib.closing(Contestant(name, task, size)))
            for name, size in micro_batches.items()
        ]
        for contestant in contestants:
            contestant.answer()
        check = {c.name: c.ask(**TURNS["update_ratio_3"], number=0) for c in contestants}
        variants = {f"{turn}/{c.name}": c.variant(request) for turn, request in TURNS.items() for c in contestants}
        rounds = harness.take_turns(variants, options.rounds)
    about = {"parameters": parameters, "rounds": options.rounds, "mean_length": options.mean_length}
    return report(check, rounds, about)


def report(check: dict[str, dict[str, Any]], rounds: dict[str, list[harness.Figures]], about: dict[str, Any]) -> int:
    found = harness.medians(rounds)
    names = ("trl", "ours")
    peaks = {turn: [max(one["peak"] for one in rounds[f"{turn}/{name}"]) for name in names] for turn in TURNS}
    seconds = {turn: [found[f"{turn}/{name}"]["seconds"] for name in names] for turn in TURNS}
    most = [max(by_turn) for by_turn in zip(*peaks.values(), strict=True)]
    losses, norms = (list(zip(check["ours"][key], check["trl"][key], strict=True)) for key in ("losses", "norms"))
    sampled = {name: found[f"step_ratio/{name}"] for name in names}
    result: dict[str, Any] = {turn: round(ours / trl, 3) for turn, (trl, ours) in seconds.items()} | {
        "memory_ratio": round(most[1] / most[0], 3),
        "loss_difference": max(abs(a - b) for a, b in losses),
        "norm_difference": max(abs(a - b) / b for a, b in norms),
        "sampled_tokens": {name: sampled[name]["tokens"] for name in names},
        "longest_sampled": {name: sampled[name]["longest"] for name in names},
        "versions": {name: version(name) for name in ("trl", "transformers", "torch", "megatron-core")},
        "threads": os.cpu_count(),
    }
    rows: list[Sequence[str]] = [("", "TRL s", "ours s", "ratio", "target", "TRL GiB", "ours GiB")]
    for title, turn in zip(TITLES, TURNS, strict=True):
        gib = [f"{peak / 2**30:.2f}" for peak in peaks[turn]]
        rows.append((title, *(f"{s:.2f}" for s in seconds[turn]), f"{result[turn]:.3f}", f"{LIMITS[turn]:.2f}", *gib))
    texts = [f"{name} {one['tokens']:.0f} tokens, the longest {one['longest']:.0f}" for name, one in sampled.items()]
    print(f"sampled in a step: {', '.join(texts)}")
    print(
        f"same responses, same weights: losses differ by {result['loss_difference']:.1e}, "
        f"gradient norms by {result['norm_difference']:.1e} of their value"
    )
    return harness.report(rows, result | about, limits=LIMITS)


if __name__ == "__main__":
    harness.start(main)
