"""Compare verdicts per second of the reward pool with plain math-verify and TRL's accuracy reward, and compare the
verdicts.

    python tools/benchmarks/rewards.py [--cases 2000] [--workers 2] [--hangs 6] [--seed 0]

The corpus depends only on the seed. It has groups of 8 responses per question, like a rollout. Three quarters of the
questions have answers like GSM8K's (integers, prices, thousands) or plain numbers like MATH's (fractions, decimals,
percentages). A quarter have expressions like MATH's (roots, polynomials, pairs, intervals, sets). About half of the
responses are right, in one of several forms; the others have one of a few wrong answers, or none. Each of the three
judges is a warm process that sees each case once. They take turns on slices of whole groups. Rates are medians over
slices and exclude the communication with a peer's process. Then `--hangs` responses that make math-verify hang are
scored with a deadline of 1 s.

The last line is JSON: speedup (over the faster peer), also by kind; verdict_changes (cases on which the pool and
math-verify differ, listed above it); hang_ratio (wall time / the time of all deadlines divided over the workers). The
exit code is 1 if any verdict changes, the speedup is below 20, or hang_ratio is above 1.2.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from grpo_mega.config.data import RewardFunctionConfig, RewardsConfig
from grpo_mega.rewards.pool import RewardPool

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import harness
from tools.conformance.reward_agreement import CHECKERS, Row, silence_peers

GROUP_SIZE = 8
KINDS = ("number", "expression")
SLICES = 5
MIN_SPEEDUP = 20
DEADLINE_S = 1.0
HANGING = (r"\int_0^1 e^{x^2}\sin(x^3)dx", r"\int_0^1 e^{x^3}\cos(x^2)dx")
WARM_UP_SEED = 1_000_003
PEERS = ("math-verify", "TRL")

Judge = Callable[[Sequence["Case"]], tuple[list[bool], float]]  # returns verdicts and seconds


@dataclass(frozen=True)
class Case:
    kind: str  # "number" or "expression"
    gold: str
    response: str


def build_corpus(num_cases: int, seed: int) -> list[Case]:
    """Return groups of GROUP_SIZE responses. They depend only on the seed."""
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < num_cases:
        kind, make = ("expression", _expression) if rng.random() < 0.25 else ("number", _number)
        gold, right, wrong = make(rng)
        cases += [Case(kind, gold, _response(rng, right, wrong)) for _ in range(GROUP_SIZE)]
    return cases[:num_cases]


def _number(rng: random.Random) -> tuple[str, list[str], list[str]]:
    """Return the gold answer, several forms of it, and wrong answers."""
    form = rng.choice(("integer", "integer", "thousands", "fraction", "decimal", "percent"))
    if form in ("integer", "thousands"):
        value = rng.randint(-50, 400) if form == "integer" else rng.randint(1000, 2_000_000)
        wrong = [str(value + d) for d in rng.sample([-10, -2, -1, 1, 3, 10], 3)]
        return str(value), [str(value), f"{value:,}", f"{value}.0"], wrong
    if form == "fraction":
        ratio = Fraction(rng.randint(1, 40), rng.choice((3, 7, 9, 11, 12, 13)))
        n, d = ratio.numerator, ratio.denominator
        right = [rf"\frac{{{n}}}{{{d}}}", f"{n}/{d}", rf"\dfrac{{{2 * n}}}{{{2 * d}}}"]
        return rf"\frac{{{n}}}{{{d}}}", right, [rf"\frac{{{n + 1}}}{{{d}}}", f"{n}/{d + 1}", str(n)]
    if form == "decimal":
        cents = rng.randint(101, 99_999)
        text = f"{cents / 100:.2f}"
        return text, [text, rf"\frac{{{cents}}}{{100}}"], [f"{(cents + d) / 100:.2f}" for d in (10, -1, 100)]
    percent = rng.randint(1, 99)
    wrong = [rf"{percent + 1}\%", str(percent + 10), rf"{100 - percent + 1}\%"]
    return rf"{percent}\%", [rf"{percent}\%", str(percent)], wrong


def _expression(rng: random.Random) -> tuple[str, list[str], list[str]]:
    """Return the gold answer, another form of it, and wrong answers. The gold answer is the first right one."""
    a, b, c = rng.randint(2, 9), rng.randint(1, 9), rng.choice((2, 3, 5, 7))
    forms = (
        ([rf"{a}\sqrt{{{c}}}", rf"\sqrt{{{a * a * c}}}"], [rf"{a + 1}\sqrt{{{c}}}", rf"{a}\sqrt{{{c + 4}}}"]),
        ([f"{a}x^2+{b}x+{c}", f"{c}+{b}x+{a}x^2"], [f"{a}x^2-{b}x+{c}", f"{a + 1}x^2+{b}x+{c}"]),
        ([f"({a},{-b})", f"({a}, {-b})"], [f"({-b},{a})", f"({a},{b})"]),
        ([rf"[{-a},{b})", rf"[{-a}, {b})"], [rf"({-a},{b})", rf"[{-a},{b + 1})"]),
        ([rf"\{{{a},{a + b}\}}", rf"\{{{a + b},{a}\}}"], [rf"\{{{a},{a + b + 1}\}}", rf"\{{{a + b}\}}"]),
        ([rf"\frac{{{a}\pi}}{{{c}}}", rf"\frac{{{a}}}{{{c}}}\pi"], [rf"{a}\pi", rf"\frac{{\pi}}{{{c}}}"]),
    )
    right, wrong = rng.choice(forms)
    return right[0], right, wrong


def _response(rng: random.Random, right: Sequence[str], wrong: Sequence[str]) -> str:
    thought = " ".join(
        f"Step {i}: we have {rng.randint(2, 99)} and {rng.randint(2, 99)} more." for i in range(1, rng.randint(4, 30))
    )
    if rng.random() < 0.04:
        return thought
    answer = rng.choice(right) if rng.random() < 0.5 else rng.choice(wrong)
    return rf"{thought} So the answer is $\boxed{{{answer}}}$."


def by_pool(pool: RewardPool, cases: Sequence[Case]) -> list[bool]:
    for key, case in enumerate(cases):
        pool.submit(key, "", case.response, rf"\boxed{{{case.gold}}}", {})
    results = pool.collect()
    return [results[key].total == 1.0 for key in range(len(cases))]


def by_peer(name: str, cases: Sequence[Case]) -> list[bool]:
    rows = [Row("", case.kind, case.gold, case.response, right=False, batch=0) for case in cases]
    return [value == 1.0 for value in CHECKERS[name](rows)]


@contextlib.contextmanager
def peer_process(name: str) -> Iterator[Judge]:
    """Yield one of PEERS in a separate process, so that no peer profits from another's cache."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), silence_peers) as process:
        yield lambda cases: process.submit(timed, partial(by_peer, name), cases).result()


def timed(judge: Callable[[Sequence[Case]], list[bool]], cases: Sequence[Case]) -> tuple[list[bool], float]:
    """Return the judge's verdicts on the cases, and the seconds."""
    verdicts: list[bool] = []
    seconds = harness.timed(lambda: verdicts.extend(judge(cases)))()["seconds"]
    return verdicts, seconds


@harness.benchmark
def main(arguments: list[str] | None) -> int:
    parser = harness.Parser(__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hangs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse(arguments, cases=1, workers=1, hangs=1)
    harness.require("trl")
    corpus = build_corpus(options.cases, options.seed)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(_pool(options.workers, 30.0))
        judges: dict[str, Judge] = {name: stack.enter_context(peer_process(name)) for name in PEERS}
        pool.wait_until_ready()
        judges["ours"] = partial(timed, partial(by_pool, pool))
        for judge in judges.values():  # warm-up: imports and tables
            judge(build_corpus(GROUP_SIZE, WARM_UP_SEED))
        rates, verdicts = _measure(judges, corpus)
    changes = [case for case, a, b in zip(corpus, verdicts["math-verify"], verdicts["ours"], strict=True) if a != b]
    for case in changes[:20]:
        print(f"math-verify and we differ: gold {case.gold!r}, response ...{case.response[-60:]!r}")
    speedups = {kind: found["ours"] / max(found[name] for name in PEERS) for kind, found in rates.items()}
    result: dict[str, Any] = {
        "speedup": round(speedups["all"], 1),
        "speedup_numbers": round(speedups["number"], 1),
        "speedup_expressions": round(speedups["expression"], 1),
        "verdict_changes": len(changes),
        "hang_ratio": round(_hang_ratio(options.hangs, options.workers), 3),
        "cases": len(corpus),
        "right": sum(verdicts["math-verify"]),
        "workers": options.workers,
    }
    rows = [("verdicts/s", *judges), *((kind, *(f"{rate:.0f}" for rate in by.values())) for kind, by in rates.items())]
    problems = [f"speedup is below {MIN_SPEEDUP}"] if result["speedup"] < MIN_SPEEDUP else []
    return harness.report(rows, result, limits={"verdict_changes": 0, "hang_ratio": 1.2}, problems=problems)


def _measure(
    judges: dict[str, Judge], corpus: Sequence[Case]
) -> tuple[dict[str, dict[str, float]], dict[str, list[bool]]]:
    """Return verdicts per second by kind (or "all") and judge, and all verdicts in the corpus's order."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)  # seconds of a case, keyed by kind and judge
    verdicts: dict[str, dict[int, bool]] = {name: {} for name in judges}
    for part in range(SLICES):
        indices = [i for i in range(len(corpus)) if i // GROUP_SIZE % SLICES == part]
        for name, judge in judges.items():
            total = 0.0
            for kind in KINDS:
                members = [i for i in indices if corpus[i].kind == kind]
                found, took = judge([corpus[i] for i in members])
                verdicts[name] |= dict(zip(members, found, strict=True))
                total += took
                if members:
                    seconds[kind, name].append(took / len(members))
            if indices:
                seconds["all", name].append(total / len(indices))
    rates = {
        kind: {name: 1 / statistics.median(seconds[kind, name] or [1.0]) for name in judges} for kind in (*KINDS, "all")
    }
    return rates, {name: [found[i] for i in range(len(corpus))] for name, found in verdicts.items()}


def _pool(workers: int, deadline_s: float) -> RewardPool:
    functions = (RewardFunctionConfig(name="accuracy"),)
    return RewardPool(RewardsConfig(functions=functions, num_workers=workers, deadline_s=deadline_s))


def _hang_ratio(num_hangs: int, workers: int) -> float:
    with _pool(workers, DEADLINE_S) as pool:
        pool.wait_until_ready()
        started_at = time.perf_counter()
        for key in range(num_hangs):
            pool.submit(key, "", rf"\boxed{{{HANGING[key % len(HANGING)]}+{key}}}", r"\boxed{x+1}", {})
        results = pool.collect()
        took = time.perf_counter() - started_at
    verdicts = [result.verdicts["accuracy"] for result in results.values()]
    assert verdicts == ["timeout"] * num_hangs, f"some of the hanging responses were judged: {verdicts}"
    return took / (DEADLINE_S * -(-num_hangs // workers))


if __name__ == "__main__":
    harness.start(main)
