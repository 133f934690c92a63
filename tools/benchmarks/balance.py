"""Measure how evenly the micro-batches of a step are balanced, and the time to plan them. Takes a few seconds on a CPU.

`python tools/benchmarks/balance.py` plans 8,192 samples (512 prompts x 16) for 64 data-parallel ranks, as batching/pack.py does
for a mini-batch, with several budgets and length limits. Prompts and responses have log-normal lengths; responses are truncated
at the limit. Figures are the worst over --seeds draws; times are the median of --repeat plans of each draw.
 waste      share of padding in all micro-batches; each is as long as the longest, rounded up to 16 x tensor-parallel ranks
 imbalance  tokens of the fullest rank / the mean - 1, without padding
 work       FLOPs of the busiest rank / the mean - 1, without padding, by batching/flops.py for Qwen3-8B
 bound      lower bound of the waste of any plan with as few micro-batches: a micro-batch is at least as long as the longest
            sample, and at least as long as the mean, rounded up
 ms, cpu    wall and CPU time of one plan; it uses one thread, so both are equal on an idle machine
Two peers plan the same samples with the same padding:
 kk         Karmarkar-Karp as verl uses it: equal numbers of samples to ranks, then each rank's samples to micro-batches. It
            ignores the budget; "over" is the excess of its longest micro-batch
 in order   128 samples to each rank in order, then each rank fills micro-batches up to the budget
The work of attention grows with the square of a sample's length, so equal tokens are not equal work. Ours balances
micro-batches over ranks by work; the peers balance tokens.

The headline is the first case: responses of up to 15k tokens and a budget of two longest samples, so rounding to 16 tokens
costs at most 0.05%. With the config's default budget of 16,384 the rounding alone costs up to 0.1%. The last line is JSON with
the headline's waste, work, ms, cpu_ms and bound, the work of responses of up to 32k tokens, and the peers' figures. Exit code 1
if waste reaches 0.1%, the work of either case reaches 2%, or planning takes more than 50 ms of CPU time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_mega import console
from grpo_mega.batching import flops
from grpo_mega.batching.pack import balance
from grpo_mega.weights.spec import ModelShape

GROUP_SIZE = 16
MAX_WASTE, MAX_WORK, MAX_MS = 1e-3, 2e-2, 50.0
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


@dataclass(frozen=True)
class Figures:
    waste: float
    imbalance: float
    work: float
    over: float  # longest micro-batch / budget - 1, at least 0
    micro_batches: int  # micro-batches per rank
    ms: float
    cpu_ms: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--dp", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    if options.samples < options.dp or min(options.dp, options.seeds, options.repeat) < 1:
        parser.exit(2, f"--samples {options.samples} must be at least --dp {options.dp}, and all above 0\n")
    print(f"{options.samples} samples on {options.dp} ranks, worst of {options.seeds} draws")
    print(
        f"{'':42}{'':9}{'micro-batches':>14}{'waste':>9}{'bound':>9}{'imbalance':>11}{'work':>9}{'over':>8}{'ms':>8}{'cpu':>8}"
    )
    results = {}
    for case in CASES:
        found, bound = results[case.name] = measure(case, options)
        for name, figures in found.items():
            shown_bound = f"{bound:9.3%}" if name == "ours" else " " * 9
            print(
                f"{case.name if name == 'ours' else '':42}{name:9}{figures.micro_batches:14}{figures.waste:9.3%}{shown_bound}"
                f"{figures.imbalance:11.4%}{figures.work:9.3%}{figures.over:8.1%}{figures.ms:8.1f}{figures.cpu_ms:8.1f}"
            )
    return report(*results[CASES[0].name], results[LONG][0])


def report(found: dict[str, Figures], bound: float, long: dict[str, Figures]) -> int:
    ours = found["ours"]
    result = {
        "waste": ours.waste,
        "imbalance": ours.imbalance,
        "work": ours.work,
        "ms": ours.ms,
        "cpu_ms": ours.cpu_ms,
        "bound": bound,
    }
    result |= {f"work_at_32k{suffix}": long[name].work for name, suffix in (("ours", ""), ("kk", "_kk"))}
    for name in ("kk", "in order"):
        result |= {f"{key}_{name.replace(' ', '_')}": getattr(found[name], key) for key in ("waste", "work", "cpu_ms")}
    print(json.dumps({key: round(value, 7) for key, value in result.items()}))
    is_even = max(ours.work, long["ours"].work) < MAX_WORK
    return 0 if ours.waste < MAX_WASTE and is_even and ours.cpu_ms <= MAX_MS else 1


def measure(case: Case, options: argparse.Namespace) -> tuple[dict[str, Figures], float]:
    """Return figures by planner, and the worst bound. The planners take turns, so noise affects all of them equally."""
    planners: dict[str, Callable[[list[int]], Plan]] = {
        "ours": lambda lengths: balance(
            lengths,
            dp_size=options.dp,
            token_budget=case.budget,
            length_multiple=case.length_multiple,
            tokens_per_pair=flops.tokens_per_pair(QWEN3_8B),
        ),
        "kk": lambda lengths: karmarkar_karp_plan(lengths, options.dp, case.budget),
        "in order": lambda lengths: plan_in_order(lengths, options.dp, case.budget),
    }
    found: dict[str, list[Figures]] = {name: [] for name in planners}
    bounds = []
    for seed in range(options.seeds):
        lengths = draw_lengths(case, options.samples, seed)
        bounds.append(least_waste(lengths, case, options.dp))
        for repeat in range(options.repeat):
            for name, planner in planners.items():
                if name != "ours" and repeat > 0:
                    continue  # the peers are slow, and only our time has a limit
                started_at, cpu_started_at = time.perf_counter(), time.process_time()
                plan = planner(lengths)
                ms, cpu_ms = 1e3 * (time.perf_counter() - started_at), 1e3 * (time.process_time() - cpu_started_at)
                found[name].append(figures_of(plan, lengths, case, ms, cpu_ms))
    return {name: worst(figures) for name, figures in found.items()}, max(bounds)


def draw_lengths(case: Case, num_samples: int, seed: int) -> list[int]:
    """Return the tokens of prompt plus response per sample. The samples of a group have the same prompt."""
    generator = random.Random(seed)
    lengths = []
    for index in range(num_samples):
        if index % GROUP_SIZE == 0:
            prompt = min(case.max_prompt, 1 + int(generator.lognormvariate(math.log(200), 0.6)))
        lengths.append(prompt + min(case.max_response, 1 + int(generator.lognormvariate(math.log(case.median_response), 0.8))))
    return lengths


def figures_of(plan: Plan, lengths: Sequence[int], case: Case, ms: float, cpu_ms: float) -> Figures:
    loads = [[sum(lengths[i] for i in members) for members in micro_batches] for micro_batches in plan]
    assert sorted(i for rank in plan for members in rank for i in members) == list(range(len(lengths)))
    longest = max(max(rank) for rank in loads)
    num_tokens = -(-longest // case.length_multiple) * case.length_multiple
    total = sum(lengths)
    of_ranks = [flops.count(QWEN3_8B, [lengths[i] for members in rank for i in members]).forward for rank in plan]
    return Figures(
        waste=1 - total / (num_tokens * sum(len(rank) for rank in plan)),
        imbalance=max(sum(rank) for rank in loads) * len(plan) / total - 1,
        work=max(of_ranks) * len(plan) / sum(of_ranks) - 1,
        over=max(0.0, longest / case.budget - 1),
        micro_batches=len(plan[0]),
        ms=ms,
        cpu_ms=cpu_ms,
    )


def least_waste(lengths: Sequence[int], case: Case, dp_size: int) -> float:
    """Return the least padding of any plan with as few micro-batches as tokens and budget allow."""
    num_bins = dp_size * -(-sum(lengths) // (case.budget * dp_size))
    shortest = max(max(lengths), -(-sum(lengths) // num_bins))
    return 1 - sum(lengths) / (num_bins * -(-shortest // case.length_multiple) * case.length_multiple)


def worst(figures: Sequence[Figures]) -> Figures:
    return Figures(
        max(f.waste for f in figures),
        max(f.imbalance for f in figures),
        max(f.work for f in figures),
        max(f.over for f in figures),
        max(f.micro_batches for f in figures),
        statistics.median(f.ms for f in figures),
        statistics.median(f.cpu_ms for f in figures),
    )


def karmarkar_karp_plan(lengths: Sequence[int], dp_size: int, budget: int) -> Plan:
    """Plan like verl: get_seqlen_balanced_partitions with equal sizes, then rearrange_micro_batches in every rank."""
    rest = len(lengths) % dp_size
    ranks = largest_differences(lengths, list(range(len(lengths))), dp_size, is_equal_size=rest == 0)
    num_micro_batches = max(-(-sum(lengths[i] for i in rank) // budget) for rank in ranks)
    return [largest_differences(lengths, rank, num_micro_batches, is_equal_size=False) for rank in ranks]


def largest_differences(lengths: Sequence[int], indices: list[int], num_parts: int, *, is_equal_size: bool) -> list[list[int]]:
    """Partition with Karmarkar and Karp's largest differencing method for several parts.

    Join the two most uneven partitions, the heavy parts of one with the light parts of the other, until one is left."""
    falling = sorted(indices, key=lambda i: -lengths[i])
    chunk = num_parts if is_equal_size else 1
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(range(0, len(falling), chunk)):
        parts = [(lengths[i], [i]) for i in falling[start : start + chunk]]
        parts += [(0, []) for _ in range(num_parts - len(parts))]
        heap.append((parts[-1][0] - parts[0][0], number, parts))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [members for _, members in heap[0][2]]


def plan_in_order(lengths: Sequence[int], dp_size: int, budget: int) -> Plan:
    ends = [len(lengths) * (rank + 1) // dp_size for rank in range(dp_size)]
    plan: Plan = []
    for start, end in zip([0, *ends], ends, strict=False):
        micro_batches: list[list[int]] = [[]]
        load = 0
        for index in range(start, end):
            if load + lengths[index] > budget:
                micro_batches.append([])
                load = 0
            micro_batches[-1].append(index)
            load += lengths[index]
        plan.append(micro_batches)
    most = max(map(len, plan))
    return [micro_batches + [[]] * (most - len(micro_batches)) for micro_batches in plan]


if __name__ == "__main__":
    console.install()
    sys.exit(main())
