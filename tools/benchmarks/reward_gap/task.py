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
import torch
from arithmetic import Problem
from transformers.utils.logging import disable_progress_bar

from grpo_mega import console
from grpo_mega.paths import user_path

UNFINISHED = 0.2
MAX_RESPONSE_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small model of sums without tags and its data.")
    parser.add_argument("out", type=user_path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    disable_progress_bar()
    rng = random.Random(options.seed)
    train, heldout = arithmetic.make_problems(rng)
    tokenizer = arithmetic.make_tokenizer()
    model = arithmetic.make_model(tokenizer)
    arithmetic.save(options.out, model, tokenizer, train, heldout)
    arithmetic.save_demonstrations(options.out, train, [demonstrate(problem, rng) for problem in train])


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
