"""Make the start data of the comparison of methods: `python tools/benchmarks/methods/task.py OUT [--seed N]`.

It is the quickstart's task with chains of 3 to 5 additions. The demonstrations nearly always drop the carry when they
add a 7, 8 or 9, so more than half of the groups of 8 have no right sample at first. They also have random blank lines,
in right and wrong responses, so lengths differ at random within a group and a limit of TIGHT tokens cuts many of them.
The longest chain needs 49 tokens without blank lines.
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

NUM_DIGITS = range(3, 6)  # number of digits added to the first term
FIRST_TERM = range(10, 40)  # the sum has two digits even with five more digits
DIGITS = range(2, 10)
CARRY_DROPPED = {5: 0.3, 6: 0.6, 7: 0.85, 8: 0.95, 9: 0.95}  # probability by the digit added
BLANK_LINE = 0.4  # must be below 0.5, otherwise a greedy response never ends
TIGHT, LOOSE = 52, 128  # limits of a response, in tokens


def main() -> None:
    options = arithmetic.read_options(
        argparse.ArgumentParser(description="Make a small model of chains of additions and its data.")
    )
    rng = random.Random(options.seed)
    train, heldout = make_problems(rng)
    tokenizer = arithmetic.make_tokenizer()
    demonstrations = [demonstrate(problem, rng) for problem in train]
    arithmetic.save(options.out, arithmetic.make_model(tokenizer), tokenizer, train, heldout, demonstrations)


def make_problems(rng: random.Random) -> tuple[list[Problem], list[Problem]]:
    """Return distinct problems: (train, held-out)."""
    problems: dict[Problem, None] = {}
    while len(problems) < arithmetic.NUM_TRAIN + arithmetic.NUM_HELDOUT:
        digits = rng.choices(DIGITS, k=rng.choice(NUM_DIGITS))
        problems[Problem((rng.choice(FIRST_TERM), *digits))] = None
    ordered = list(problems)
    return ordered[arithmetic.NUM_HELDOUT :], ordered[: arithmetic.NUM_HELDOUT]


def demonstrate(problem: Problem, rng: random.Random) -> str:
    """Return a response with dropped carries and random blank lines."""
    total, lines = problem.terms[0], []
    for term in problem.terms[1:]:
        dropped = total % 10 + term >= 10 and rng.random() < CARRY_DROPPED.get(term, 0.0)
        following = total + term - (10 if dropped else 0)
        lines.append(f"{total}+{term}={following}")
        while rng.random() < BLANK_LINE:
            lines.append("")
        total = following
    return "<think>\n" + "\n".join(lines) + f"\n</think>\n<answer>{total}</answer>"


if __name__ == "__main__":
    console.filter_output()
    main()
