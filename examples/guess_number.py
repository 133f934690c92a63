"""A text environment as an agent function: the model guesses a number, and is told "higher" or "lower".

    rollout: {agent: "examples/guess_number.py:run", max_turns: 8}
    rewards: {functions: []}

Each row of the data has a prompt, such as "Guess my number from 1 to 100.", and the number as answer.
"""

from __future__ import annotations

import re
from typing import Any


async def run(chat: Any, prompt: Any) -> dict[str, float]:
    """Play one game. Return the rewards: whether the number was found, and how many turns were left."""
    messages, number, most = list(prompt.messages), int(prompt.answer), 8
    for turn in range(most):
        message = await chat(messages)
        guesses = re.findall(r"-?\d+", message["content"] or "")
        if not guesses:
            reply = "Answer with a number."
        elif int(guesses[-1]) == number:
            return {"found": 1.0, "speed": (most - turn) / most}
        else:
            reply = "higher" if int(guesses[-1]) < number else "lower"
        messages += [message, {"role": "user", "content": reply}]
    return {"found": 0.0, "speed": 0.0}
