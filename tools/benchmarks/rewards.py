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

import argparse
import contextlib
import json
import logging
import pickle
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from grpo_mega import console
from grpo_mega.config.rewards import RewardFunctionConfig, RewardsConfig
from grpo_mega.rewards.pool import RewardPool

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to run this file as a script

from tools.benchmarks import peers

GROUP_SIZE = 8
SLICES = 5
DEADLINE_S = 1.0
HANGING = (r"\int_0^1 e^{x^2}\sin(x^3)dx", r"\int_0^1 e^{x^3}\cos(x^2)dx")
WARM_UP_SEED = 1_000_003

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
        kind = "expression" if rng.random() < 0.25 else "number"
        gold, right, wrong = (_expression if kind == "expression" else _number)(rng)
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
    return (
        rf"{percent}\%",
        [rf"{percent}\%", str(percent)],
        [rf"{percent + 1}\%", str(percent + 10), rf"{100 - percent + 1}\%"],
    )


def _expression(rng: random.Random) -> tuple[str, list[str], list[str]]:
    a, b, c = rng.randint(2, 9), rng.randint(1, 9), rng.choice((2, 3, 5, 7))
    forms = {
        "root": (
            rf"{a}\sqrt{{{c}}}",
            [rf"{a}\sqrt{{{c}}}", rf"\sqrt{{{a * a * c}}}"],
            [rf"{a + 1}\sqrt{{{c}}}", rf"{a}\sqrt{{{c + 4}}}"],
        ),
        "polynomial": (
            f"{a}x^2+{b}x+{c}",
            [f"{a}x^2+{b}x+{c}", f"{c}+{b}x+{a}x^2"],
            [f"{a}x^2-{b}x+{c}", f"{a + 1}x^2+{b}x+{c}"],
        ),
        "pair": (f"({a},{-b})", [f"({a},{-b})", f"({a}, {-b})"], [f"({-b},{a})", f"({a},{b})"]),
        "interval": (
            rf"[{-a},{b})",
            [rf"[{-a},{b})", rf"[{-a}, {b})"],
            [rf"({-a},{b})", rf"[{-a},{b + 1})"],
        ),
        "set": (
            rf"\{{{a},{a + b}\}}",
            [rf"\{{{a},{a + b}\}}", rf"\{{{a + b},{a}\}}"],
            [rf"\{{{a},{a + b + 1}\}}", rf"\{{{a + b}\}}"],
        ),
        "pi": (
            rf"\frac{{{a}\pi}}{{{c}}}",
            [rf"\frac{{{a}\pi}}{{{c}}}", rf"\frac{{{a}}}{{{c}}}\pi"],
            [rf"{a}\pi", rf"\frac{{\pi}}{{{c}}}"],
        ),
    }
    return forms[rng.choice(list(forms))]


def _response(rng: random.Random, right: Sequence[str], wrong: Sequence[str]) -> str:
    thought = " ".join(
        f"Step {i}: we have {rng.randint(2, 99)} and {rng.randint(2, 99)} more." for i in range(1, rng.randint(4, 30))
    )
    if rng.random() < 0.04:
        return thought
    answer = rng.choice(right) if rng.random() < 0.5 else rng.choice(wrong)
    return rf"{thought} So the answer is $\boxed{{{answer}}}$."


def by_math_verify(cases: Sequence[Case]) -> list[bool]:
    from math_verify import parse, verify

    return [bool(verify(parse(rf"$\boxed{{{case.gold}}}$"), parse(case.response))) for case in cases]


def by_trl(cases: Sequence[Case]) -> list[bool]:
    from trl.rewards import accuracy_reward

    completions = [[{"role": "assistant", "content": case.response}] for case in cases]
    return [bool(value) for value in accuracy_reward(completions, [rf"$\boxed{{{case.gold}}}$" for case in cases])]


def by_pool(pool: RewardPool, cases: Sequence[Case]) -> list[bool]:
    for key, case in enumerate(cases):
        pool.submit(key, "", case.response, rf"\boxed{{{case.gold}}}", {})
    results = pool.collect()
    return [results[key].total == 1.0 for key in range(len(cases))]


PEERS = {"math-verify": by_math_verify, "TRL": by_trl}


class Peer:
    """One of PEERS in a separate process, so that no peer profits from another's cache. A context manager."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--judge", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Judge:
        return self._judge

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _judge(self, cases: Sequence[Case]) -> tuple[list[bool], float]:
        assert self._process.stdin and self._process.stdout
        pickle.dump([(case.kind, case.gold, case.response) for case in cases], self._process.stdin)
        self._process.stdin.flush()
        verdicts, seconds = pickle.load(self._process.stdout)
        return verdicts, seconds


def serve_peer(name: str) -> None:
    """Serve as a peer's process: read lists of cases from stdin until its end, write verdicts and seconds to stdout."""
    for logger in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    with contextlib.suppress(EOFError):
        while True:
            cases = [Case(*fields) for fields in pickle.load(sys.stdin.buffer)]
            found = timed(PEERS[name], cases)
            pickle.dump(found, sys.stdout.buffer)
            sys.stdout.buffer.flush()


def timed(judge: Callable[[Sequence[Case]], list[bool]], cases: Sequence[Case]) -> tuple[list[bool], float]:
    """Return the judge's verdicts on the cases, and the seconds."""
    started_at = time.perf_counter()
    verdicts = judge(cases)
    return verdicts, time.perf_counter() - started_at


def main() -> int:
    options = _options()
    if options.judge:
        serve_peer(options.judge)
        return 0
    corpus = build_corpus(options.cases, options.seed)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(_pool(options.workers, 30.0))
        judges: dict[str, Judge] = {name: stack.enter_context(Peer(name)) for name in PEERS}
        pool.wait_until_ready()
        judges["ours"] = lambda cases: timed(lambda some: by_pool(pool, some), cases)
        for judge in judges.values():  # warm-up: imports and tables
            judge(build_corpus(GROUP_SIZE, WARM_UP_SEED))
        rates, verdicts = _measure(judges, corpus)
    changes = [case for case, a, b in zip(corpus, verdicts["math-verify"], verdicts["ours"], strict=True) if a != b]
    for case in changes[:20]:
        print(f"math-verify and we differ: gold {case.gold!r}, response ...{case.response[-60:]!r}")
    for kind, found in rates.items():
        print(f"{kind:11} " + "  ".join(f"{name} {rate:9.0f}/s" for name, rate in found.items()))
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
    print(json.dumps(result))
    return 0 if result["speedup"] >= 20 and not changes and result["hang_ratio"] <= 1.2 else 1


def _measure(
    judges: dict[str, Judge], corpus: Sequence[Case]
) -> tuple[dict[str, dict[str, float]], dict[str, list[bool]]]:
    """Return verdicts per second by kind (or "all") and judge, and all verdicts in the corpus's order."""
    seconds: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in judges} for kind in ("number", "expression", "all")
    }
    verdicts: dict[str, dict[int, bool]] = {name: {} for name in judges}
    groups = [range(first, min(first + GROUP_SIZE, len(corpus))) for first in range(0, len(corpus), GROUP_SIZE)]
    for part in range(SLICES):
        places = [place for group in groups[part::SLICES] for place in group]
        of_kind = {kind: [i for i in places if corpus[i].kind == kind] for kind in ("number", "expression")}
        for name, judge in judges.items():
            total = 0.0
            for kind, members in of_kind.items():
                found, took = judge([corpus[i] for i in members])
                verdicts[name] |= dict(zip(members, found, strict=True))
                total += took
                if members:
                    seconds[kind][name].append(took / len(members))
            if places:
                seconds["all"][name].append(total / len(places))
    rates = {
        kind: {name: 1 / statistics.median(values or [1.0]) for name, values in found.items()}
        for kind, found in seconds.items()
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


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--hangs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", choices=tuple(PEERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    peers.require("trl")
    return options


if __name__ == "__main__":
    console.filter_output()
    sys.exit(main())
