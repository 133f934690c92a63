"""A contestant's process: the real trainer of one side, which answers requests, and its peak memory."""

from __future__ import annotations

import importlib
import os
from multiprocessing.connection import Connection
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch

from grpo_mega.distributed.device import Device, PeakMemory
from grpo_mega.text import filter_output
from tools.benchmarks.vs_trl.task import Task


def run(name: str, task: Task, channel: Connection, micro_batch: int, log: Path) -> None:
    """Serve as "trl" or "ours". `micro_batch` counts samples for TRL and tokens for ours. The output goes to the log.

    A request is a dict, or None at the end. The first answer says that the trainer is ready.
    """
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    filter_output()
    side = importlib.import_module(f"tools.benchmarks.vs_trl.{'peer' if name == 'trl' else 'ours'}")
    side.serve(task, channel, micro_batch)


class Peak(PeakMemory):
    """The peak resident memory of this process since the last call, plus the current memory of its children."""

    def __init__(self) -> None:
        super().__init__(Device("cpu", torch.device("cpu")))

    def take(self) -> int:
        return super().take() + sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
