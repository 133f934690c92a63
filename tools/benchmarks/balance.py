"""Measure how evenly the micro-batches of a step are balanced, and the time to plan them. Takes a few seconds on a CPU.

`python tools/benchmarks/balance.py` plans 8,192 samples (512 prompts x 16) for 64 data-parallel ranks, as
batching/pack.py does for a mini-batch, with several budgets and length limits. Prompts and responses have log-normal
lengths; responses are truncated at the limit. Figures are the worst over --seeds draws; times are the median of
--repeat plans of each draw.
 waste      share of padding in all micro-batches; each is as long as the longest, rounded up to 16 x tensor-parallel
            ranks
 bound      lower bound of the waste of any plan with as few micro-batches: a micro-batch is at least as long as the
            longest sample, and at least as long as the mean, rounded up
 imbalance  tokens of the fullest rank / the mean - 1, without padding
 work       FLOPs of the busiest rank / the mean - 1, without padding, by planner/state.py for Qwen3-8B
 ms, cpu    wall and CPU time of one plan; it uses one thread, so both are equal on an idle machine
The work of attention grows with the square of a sample's length, so the ranks get equal work, not equal tokens.

The headline is the first case: responses of up to 15k tokens and a budget of two longest samples, so rounding to 16
tokens costs at most 0.05%. With the config's default budget of 16,384 the rounding alone costs up to 0.1%. The last
line is JSON with the headline's figures, and the work of responses of up to 32k tokens. Exit code 1 if waste is above
0.1%, the work of either case is above 2%, or planning takes more than 50 ms of CPU time.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from grpo_mega.batching import flops
from grpo_mega.batching.pack import balance
from grpo_mega.weights.spec import ModelShape
from tools.benchmarks import harness

GROUP_SIZE = 16
LIMITS = {"waste": 1e-3, "work": 2e-2, "work_at_32k": 2e-2, "cpu_ms": 50.0}
QWEN3_8B = ModelShape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, tied=False)

Plan = list[list[list[int]]]  # [dp_rank][micro_batch] -> indices


@dataclass(frozen=True)
class Case:
    name: str
    max_response: int
    budget: int
    tp: int = 1
    median_response: int = 1500
    max_prompt: int = 1024

    @property
    def length_multiple(self) -> int:
        return 16 * self.tp  # equals the length_multiple of Policy.packing in bf16

    def padded(self, num_tokens: int) -> int:
        return -(-num_tokens // self.length_multiple) * self.length_multiple


LONG = "samples up to 32768, budget 32768"
CASES = (
    Case("samples up to 16384, budget 32768", 15360, 32768),
    Case(LONG, 31744, 32768, median_response=4000),
    Case("samples up to 16384, budget 65536", 15360, 65536),
    Case("samples up to 8192, budget 16384", 7168, 16384),
    Case("the same, tp=8", 7168, 16384, tp=8),
    Case("slurm/llama3_70b_bf16.yaml, tp=4", 3072, 8192, tp=4, median_response=700),
    Case("samples up to 16384, budget 16384", 15360, 16384),
)


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--dp", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse(arguments, dp=1, seeds=1, repeat=1)
    if options.samples < options.dp:
        parser.error(f"--samples={options.samples} must be at least --dp={options.dp}")
    draws = {case: [draw_lengths(case, options.samples, seed) for seed in range(options.seeds)] for case in CASES}
    found = {case.name: measure(case, draws[case], options.dp, options.repeat) for case in CASES}
    print(f"{options.samples} samples on {options.dp} ranks, worst of {options.seeds} draws")
    rows: list[Sequence[str]] = [("", "waste", "bound", "imbalance", "work", "micro-batches", "ms", "cpu")]
    for name, f in found.items():
        shares = [f"{f[key]:.4%}" for key in ("waste", "bound", "imbalance", "work")]
        rows.append((name, *shares, f"{f['micro_batches']:.0f}", f"{f['ms']:.1f}", f"{f['cpu_ms']:.1f}"))
    result = found[CASES[0].name] | {"work_at_32k": found[LONG]["work"]}
    return harness.report(rows, {key: round(value, 7) for key, value in result.items()}, limits=LIMITS)


def measure(case: Case, draws: Sequence[Sequence[int]], dp_size: int, repeat: int) -> harness.Figures:
    """Return the worst figures of the draws, and the median times."""
    plans: list[Plan] = []

    def plan(lengths: Sequence[int]) -> None:
        options: dict[str, Any] = {"dp_size": dp_size, "token_budget": case.budget}
        options |= {"length_multiple": case.length_multiple, "tokens_per_pair": flops.tokens_per_pair(QWEN3_8B)}
        plans.append(balance(lengths, **options))

    times = [harness.timed(partial(plan, lengths))() for lengths in draws for _ in range(repeat)]
    found = [figures_of(plan, lengths, case) for plan, lengths in zip(plans[::repeat], draws, strict=True)]
    worst = {key: max(figures[key] for figures in found) for key in found[0]}
    ms = {"ms": "seconds", "cpu_ms": "cpu_seconds"}
    return worst | {name: 1e3 * statistics.median(one[key] for one in times) for name, key in ms.items()}


def draw_lengths(case: Case, num_samples: int, seed: int) -> list[int]:
    """Return the tokens of prompt plus response per sample. The samples of a group have the same prompt."""
    generator = random.Random(seed)
    lengths = []
    for index in range(num_samples):
        if index % GROUP_SIZE == 0:
            prompt = min(case.max_prompt, 1 + int(generator.lognormvariate(math.log(200), 0.6)))
        response = 1 + int(generator.lognormvariate(math.log(case.median_response), 0.8))
        lengths.append(prompt + min(case.max_response, response))
    return lengths


def figures_of(plan: Plan, lengths: Sequence[int], case: Case) -> harness.Figures:
    loads = [[sum(lengths[i] for i in members) for members in micro_batches] for micro_batches in plan]
    assert sorted(i for rank in plan for members in rank for i in members) == list(range(len(lengths)))
    num_tokens = case.padded(max(max(rank) for rank in loads))
    total = sum(lengths)
    work = [flops.count(QWEN3_8B, [lengths[i] for members in rank for i in members]).forward for rank in plan]
    return {
        "waste": 1 - total / (num_tokens * sum(len(rank) for rank in plan)),
        "bound": least_waste(lengths, case, len(plan)),
        "imbalance": max(sum(rank) for rank in loads) * len(plan) / total - 1,
        "work": max(work) * len(plan) / sum(work) - 1,
        "micro_batches": len(plan[0]),
    }


def least_waste(lengths: Sequence[int], case: Case, dp_size: int) -> float:
    """Return the least padding of any plan with as few micro-batches as tokens and budget allow."""
    num_bins = dp_size * -(-sum(lengths) // (case.budget * dp_size))
    shortest = max(max(lengths), -(-sum(lengths) // num_bins))
    return 1 - sum(lengths) / (num_bins * case.padded(shortest))


if __name__ == "__main__":
    harness.start(main)
