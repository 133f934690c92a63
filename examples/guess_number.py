"""A text environment as an agent function: the model guesses a number, and is told "higher" or "lower".

    examples/quickstart.sh --game

This command trains a small model. `run` is the agent function that guess_number.yaml names in
rollout.agent. It works with any model: each row of the data has a prompt, such as "Guess my number from 10 to 40.", and
the number as answer.

`python examples/guess_number.py OUT --seed N` makes OUT/model (a small Qwen2 checkpoint with random weights),
OUT/train.jsonl and OUT/heldout.jsonl with {"prompt": "10-40?", "answer": "23"}, and OUT/sft.jsonl with games. The games
are played at random: a guess is any number that is still possible, and sometimes any number at all (CARELESS). So after
`grpo-mega sft` (guess_number_sft.yaml) the model finds about half of the numbers in time. GRPO teaches it to halve the
range. The output is deterministic for a given seed.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from typing import Any

from grpo_mega.text import filter_output

sys.path.insert(0, str(Path(__file__).parent))  # for `arithmetic`

NUMBERS = range(10, 41)
MAX_TURNS = 5  # enough for 31 numbers if each guess halves the range
CARELESS = 0.1
NUM_TRAIN, NUM_GAMES = 1024, 4096
NO_NUMBER = "Answer with a number."
SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>"]


async def run(chat: Any, prompt: Any) -> float:
    """Play one game. Return the reward: 1 if the model finds the number in time, else 0."""
    messages = list(prompt.messages)
    for _ in range(MAX_TURNS):
        message = await chat(messages)
        reply = reply_to(message["content"] or "", int(prompt.answer))
        if reply is None:
            return 1.0
        messages += [message, {"role": "user", "content": reply}]
    return 0.0


def reply_to(text: str, number: int) -> str | None:
    """Return the answer to a guess; None if it is right."""
    guesses = re.findall(r"-?\d+", text)
    if not guesses:
        return NO_NUMBER
    guess = int(guesses[-1])
    return None if guess == number else "higher" if guess < number else "lower"


def demonstrate(number: int, rng: random.Random) -> list[dict[str, str]]:
    """Return a game that is played at random."""
    messages, possible = [{"role": "user", "content": prompt_text()}], list(NUMBERS)
    for _ in range(MAX_TURNS):
        guess = rng.choice(NUMBERS if rng.random() < CARELESS else possible)
        messages.append({"role": "assistant", "content": str(guess)})
        reply = reply_to(str(guess), number)
        if reply is None:
            break
        messages.append({"role": "user", "content": reply})
        possible = [one for one in possible if one != guess and (one > guess) == (reply == "higher")]
    return messages[: 1 + max(place for place, one in enumerate(messages) if one["role"] == "assistant")]


def prompt_text() -> str:
    return f"{NUMBERS[0]}-{NUMBERS[-1]}?"


def main() -> None:
    from arithmetic import CHARACTERS, CHAT_TEMPLATE, make_model, make_tokenizer, read_options, save_task

    description = "Make a small model and its data for guessing a number."
    options = read_options(argparse.ArgumentParser(description=description))
    rng = random.Random(options.seed)
    tokenizer = make_tokenizer(SPECIAL_TOKENS, ["higher", "lower", NO_NUMBER], CHARACTERS, CHAT_TEMPLATE)
    rows: dict[str, list[dict[str, Any]]] = {
        "train": [{"prompt": prompt_text(), "answer": str(rng.choice(NUMBERS))} for _ in range(NUM_TRAIN)],
        "heldout": [{"prompt": prompt_text(), "answer": str(number)} for number in NUMBERS],
        "sft": [{"messages": demonstrate(rng.choice(NUMBERS), rng)} for _ in range(NUM_GAMES)],
    }
    save_task(options.out, make_model(tokenizer), tokenizer, rows)
    print(f"a model with random weights, {NUM_GAMES} games, and all {len(NUMBERS)} numbers are in {options.out}")


if __name__ == "__main__":
    filter_output()
    main()
