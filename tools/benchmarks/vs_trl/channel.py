"""The channel to a contestant, a line of JSON each way, and the peak of its memory."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

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
