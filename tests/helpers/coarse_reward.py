"""A reward with two values, equal over a whole group now and then, and a list of all that it was asked about."""

import json
import os
from pathlib import Path
from typing import Any

SCORED = "GRPO_MEGA_TESTS_SCORED"  # environment variable: a file to which each prompt and response is added as a line of JSON


def right_for_a_third(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    if path := os.environ.get(SCORED):
        with Path(path).open("a") as file:
            file.write(json.dumps([prompt, response]) + "\n")
    return float(sum(map(ord, response)) % 3 == 0)
