"""Make the quickstart's sums without tags: `python tools/benchmarks/reward_gap/task.py OUT [--seed N]`.

So the accuracy reward reads the answer from plain text. With probability UNFINISHED a demonstration stops before the
result of its last sum, with or without the "=". A reward must not pay for this, and a policy finds it easily.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

import arithmetic  # type: ignore[import-not-found]
from arithmetic import Problem

from grpo_mega import console

UNFINISHED = 0.2
MAX_RESPONSE_TOKENS = 32


def main() -> None:
    options = arithmetic.read_options(
        argparse.ArgumentParser(description="Make a small model of sums without tags and its data.")
    )
    rng = random.Random(options.seed)
    train, heldout = arithmetic.make_problems(rng)
    tokenizer = arithmetic.make_tokenizer()
    demonstrations = [demonstrate(problem, rng) for problem in train]
    arithmetic.save(options.out, arithmetic.make_model(tokenizer), tokenizer, train, heldout, demonstrations)


def demonstrate(problem: Problem, rng: random.Random) -> str:
    """Return the quickstart's lines without tags; with probability UNFINISHED cut the result of the last sum."""
    lines = arithmetic.demonstrate(problem, rng).partition("</think>")[0].removeprefix("<think>").strip()
    if rng.random() >= UNFINISHED:
        return lines
    unfinished, equals, _ = lines.rpartition("=")
    return unfinished + rng.choice(("", equals))


if __name__ == "__main__":
    console.filter_output()
    main()
