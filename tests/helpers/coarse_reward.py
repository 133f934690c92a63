"""A reward with two values, sometimes equal over a whole group. It lists all scored prompts and responses."""

import json
import os
from pathlib import Path
from typing import Any

SCORED = "GRPO_MEGA_TESTS_SCORED"  # environment variable: a file that gets a JSON line per scored response


def right_for_a_third(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    if path := os.environ.get(SCORED):
        with Path(path).open("a") as file:
            file.write(json.dumps([prompt, response]) + "\n")
    return float(sum(map(ord, response)) % 3 == 0)
