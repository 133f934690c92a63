"""Make word sums, the task of smollm2.sh: `python examples/word_sums.py OUT [--seed N]`.

Output: OUT/train.jsonl and OUT/heldout.jsonl with {"prompt": "Anna has 17 apples and gets 5 more. ...", "answer":
"22"}. The two numbers of a held-out sum are in no training prompt together, in either order, so a policy cannot
memorize held-out answers. The output depends only on the seed.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator

from grpo_mega.paths import user_path
from grpo_mega.text import filter_output

NUMBERS = range(2, 21)
HELDOUT_SHARE = 0.3  # share of the pairs of numbers that only held-out prompts have
NUM_TRAIN = 2000
NUM_HELDOUT = 128
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Finn", "Grace", "Hugo")
THINGS = ("apples", "marbles", "books", "coins", "stamps", "pencils")
QUESTIONS = (
    "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} {things} in another. How many {things} are there in total?",
    "What is {a} plus {b}?",
)
REQUEST = "Give only the sum and the result."

Pair = tuple[int, int]
Row = tuple[str, str]  # prompt and answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Make word sums for training and evaluation.")
    parser.add_argument("out", type=user_path, help="folder to write train.jsonl and heldout.jsonl to")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    pairs = list(itertools.combinations_with_replacement(NUMBERS, 2))
    rng.shuffle(pairs)
    num_heldout = round(HELDOUT_SHARE * len(pairs))
    options.out.mkdir(parents=True, exist_ok=True)
    heldout: dict[Row, None] = {}
    draws = make_rows(pairs[:num_heldout], rng)
    while len(heldout) < NUM_HELDOUT:
        heldout[next(draws)] = None
    train = itertools.islice(make_rows(pairs[num_heldout:], rng), NUM_TRAIN)
    for name, rows in (("train", train), ("heldout", heldout)):
        lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows]
        (options.out / f"{name}.jsonl").write_text("".join(lines))
    print(f"{NUM_TRAIN} training prompts, {NUM_HELDOUT} held-out prompts; see {options.out}")


def make_rows(pairs: list[Pair], rng: random.Random) -> Iterator[Row]:
    """Yield (prompt, answer) without end. Prompts may repeat."""
    while True:
        a, b = rng.sample(rng.choice(pairs), 2)
        question = rng.choice(QUESTIONS).format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
        yield f"{question} {REQUEST}", str(a + b)


if __name__ == "__main__":
    filter_output()
    main()
