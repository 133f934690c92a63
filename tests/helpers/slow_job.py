"""A pool's job with an accuracy reward that hangs, dies or counts as the text says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from grpo_mega.rewards.api import RewardFunction, Score
from grpo_mega.rewards.math.accuracy import accuracy
from grpo_mega.rewards.worker import CheckJob


class SlowJob(CheckJob):
    def _import(self) -> dict[str, RewardFunction]:
        return super()._import() | {"accuracy": slow_accuracy}


def slow_accuracy(prompt: str, response: str, answer: str, extras: dict[str, Any]) -> Score:
    """Append the call to the file extras["calls"]. Hang if the response contains "SLOW". Kill the worker on
    "DEADLY".
    """
    if "calls" in extras:
        with Path(extras["calls"]).open("a") as file:
            file.write("call\n")
    if "SLOW" in response:
        time.sleep(600)
    if "DEADLY" in response:
        os.kill(os.getpid(), signal.SIGKILL)
    return accuracy(prompt, response, answer, extras)
