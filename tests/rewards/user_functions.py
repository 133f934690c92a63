"""A user's reward functions, good and bad. The pool's tests name them by their dotted paths."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from grpo_mega.rewards.api import NoScore, Score, Step


def length(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    return float(len(prompt) + 10 * len(response) + 100 * len(answer) + extras.get("bonus", 0))


def only_for_math(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score | None:
    return Score(0.5, "math") if extras.get("kind") == "math" else None


def obey(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Any:
    """Do what the response says."""
    deeds = {
        "hang in C": lambda: re.match(r"(a|a)*b", "a" * 60),
        "sleep": lambda: time.sleep(600),
        "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "be killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
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
    if response.startswith("sleep at first: "):
        mark = Path(response.removeprefix("sleep at first: "))
        if not mark.exists():
            mark.write_text(str(os.getpid()))
            time.sleep(600)
    return deeds[response]() if response in deeds else 1.0


def hang(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    """Hang forever as the response says. None of these processes ends by itself when its parent ends."""
    spin = "while True: pass"
    if response == "in a regular expression":
        re.match(r"(a|a)*b", "a" * 60)
    elif response == "on a fork":
        if os.fork():
            signal.pause()
    elif response == "on a new session":
        subprocess.run([sys.executable, "-c", spin], start_new_session=True)
    elif response == "on a daemon":
        subprocess.run([sys.executable, "-c", f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{spin}"])
        signal.pause()
    elif response == "deaf to signals":
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def half_of_them(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float | None:
    return None if "none" in response else 0.5


def weighted_length(
    prompt: str,
    response: str,
    answer: str,
    extras: dict[str, Any],
    *,
    factor: float,
    unit: str = "",
    step_splitter: str = "",
) -> Score:
    return Score(factor * len(response), f"{unit}|{step_splitter}")


def no_score(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    if response == "lost":
        raise NoScore("the scales are broken")
    return 1.0


def marked(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """End a step at each "." (reward 1) and each "!" (reward -1). With a "@" the response has a reward, too."""
    steps = tuple(Step(i + 1, 1.0 if c == "." else -1.0) for i, c in enumerate(response) if c in ".!")
    return Score(2.0 if "@" in response else None, "marked", steps)


def other_marks(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """End a step at each "." and each ","."""
    return Score(None, "marked", tuple(Step(i + 1, 0.25) for i, c in enumerate(response) if c in ".,"))


def bad_steps(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Return steps that end at the characters in the response. A letter is an infinite reward."""
    return Score(1.0, "x", tuple(Step(int(c), 1.0) if c.isdigit() else Step(1, float("inf")) for c in response))


def lose_all(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> float:
    raise NoScore("the scales are broken")


def tell_finish_reason(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    return Score(1.0, str(extras["finish_reason"]))


def num_messages(prompt, response, answer, extras):
    return float(len(extras["messages"]))


def end_of_last_turn(prompt, response, answer, extras):
    return Score(5.0, "scored", (Step(len(response), 5.0),))
