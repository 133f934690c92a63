"""Make the benchmark's start model and data: `python tools/benchmarks/methods/task.py OUT [--seed N]`.

It is the quickstart's task, but hard enough to show differences between methods. A sum has 3 to 5 steps, and the SFT data
nearly always drops the carry when it adds a 7, 8 or 9. At first more than half of the groups of 8 have no right sample, and an
eighth have exactly one. The SFT data also has random blank lines: one or more with probability BLANK_LINE, in right and wrong
responses. So lengths differ at random within a group, and a bias for short or long responses would be visible.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))

import arithmetic  # type: ignore[import-not-found]
import torch
from arithmetic import Problem
from transformers.utils.logging import disable_progress_bar

from grpo_mega import console
from grpo_mega.paths import user_path

NUM_DIGITS = range(3, 6)  # number of digits added to the first term
FIRST_TERM = range(10, 40)  # the sum has two digits even with five more digits
DIGITS = range(2, 10)
CARRY_DROPPED = {5: 0.3, 6: 0.6, 7: 0.85, 8: 0.95, 9: 0.95}  # probability by the digit added
BLANK_LINE = 0.4  # must be below 0.5, otherwise a greedy response never ends
MAX_RESPONSE_TOKENS = 80
TARGET_SCORE = 0.15  # greedy score that ends the supervised training; a perfect imitator scores about 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small model of long sums and its data.")
    parser.add_argument("out", type=user_path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    disable_progress_bar()
    rng = random.Random(options.seed)
    train, heldout = make_problems(rng)
    tokenizer = arithmetic.make_tokenizer()
    model = arithmetic.make_model(tokenizer)
    steps = arithmetic.train_supervised(model, tokenizer, train, rng, demonstrate, TARGET_SCORE, MAX_RESPONSE_TOKENS)
    score = arithmetic.greedy_score(model, tokenizer, heldout, MAX_RESPONSE_TOKENS)
    arithmetic.save(options.out, model, tokenizer, train, heldout)
    print(f"held-out score {score:.3f} after {steps} supervised steps; see {options.out}")


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
    console.install()
    main()
