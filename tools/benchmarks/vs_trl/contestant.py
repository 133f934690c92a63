"""A contestant's process: `contestant.py trl|ours TASK MICRO_BATCH`, with its channel to the benchmark and its peak
memory.

MICRO_BATCH counts samples for TRL and tokens for ours.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from grpo_mega import console
from grpo_mega.distributed.device import Device, PeakMemory
from tools.benchmarks.vs_trl.task import Task


class Channel:
    """One line of JSON per message, on standard input and output. Other output of the process goes to stderr from now
    on.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """Return the next request; None at the end of the input."""
        line = sys.stdin.readline()
        return dict(json.loads(line)) if line else None

    def send(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self._out, flush=True)


class Peak(PeakMemory):
    """The peak resident memory of this process since the last call, plus the current memory of its children."""

    def __init__(self) -> None:
        super().__init__(Device("cpu", torch.device("cpu")))

    def take(self) -> int:
        return super().take() + sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


def main() -> None:
    name, task, micro_batch = sys.argv[1:]
    channel = Channel()
    if name == "trl":
        from tools.benchmarks.vs_trl.peer import serve as serve_trl

        serve_trl(Task.from_json(task), channel, int(micro_batch))
    else:
        from tools.benchmarks.vs_trl.ours import serve as serve_ours

        serve_ours(Task.from_json(task), channel, int(micro_batch))


if __name__ == "__main__":
    console.filter_output()
    main()
