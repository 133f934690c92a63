"""The channel to a contestant, with one line of JSON per message, and its peak memory."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from grpo_mega.distributed.device import Device, PeakMemory


class Channel:
    """Standard input and output. Other output of the process goes to stderr from now on."""

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
