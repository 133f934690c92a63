"""Reward functions of a user, good and bad, for the pool's tests; named there by their dotted paths."""

import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

from grpo_mega.rewards.score import Score


def length(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    return float(len(prompt) + 10 * len(response) + 100 * len(answer) + extras.get("bonus", 0))


def only_for_math(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score | None:
    return Score(0.5, "math") if extras.get("kind") == "math" else None


def obey(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Any:
    """Does what the response says."""
    deeds = {
        "hang in C": lambda: re.match(r"(a|a)*b", "a" * 60),
        "sleep": lambda: time.sleep(600),
        "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "exit": lambda: os._exit(3),
        "exhaust memory": lambda: bytearray(1 << 45),
        "raise": lambda: 1 / 0,
        "sys.exit": lambda: sys.exit(4),
        "print": lambda: print("noise", flush=True) or os.write(1, b"noise") + len(sys.stdin.read()) - 4.0,
        "nan": lambda: float("nan"),
        "text": lambda: "1.0",
        "child": lambda: float(subprocess.Popen(["sleep", "600"]).pid),
        "pid": lambda: float(os.getpid()),
        "torch": lambda: float("torch" in sys.modules),
    }
    return deeds[response]() if response in deeds else 1.0
