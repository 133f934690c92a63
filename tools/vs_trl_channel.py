"""One contestant of bench_vs_trl.py as a process: a line of JSON each way, and the peak of its memory.

`python vs_trl_channel.py trl|ours TASK MICRO_BATCH TOKENS_PER_MICRO_BATCH`, started by bench_vs_trl.py.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from vs_trl_task import Task

from grpo_mega.hardware.device import Device, PeakMemory


class Channel:
    """Standard input and output, to which nothing else of the process writes from now on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """The next request; None once there will be none."""
        line = sys.stdin.readline()
        return dict(json.loads(line)) if line else None

    def send(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self._out, flush=True)


class Peak(PeakMemory):
    """The most resident memory of this process since it was last asked, and what its children hold now."""

    def __init__(self) -> None:
        super().__init__(Device("cpu", torch.device("cpu")))

    def take(self) -> int:
        return super().take() + sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


def main() -> None:
    name, task, micro_batch, tokens = sys.argv[1:]
    channel = Channel()
    if name == "trl":
        from vs_trl_peer import serve as serve_trl

        serve_trl(Task.from_json(task), channel, int(micro_batch))
    else:
        from vs_trl_ours import serve as serve_ours

        serve_ours(Task.from_json(task), channel, int(tokens))


if __name__ == "__main__":
    main()
