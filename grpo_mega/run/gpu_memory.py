"""Measure the GPU memory of policy and engine, and decide if both fit on a device at once, identically on all ranks.

The policy needs the peak of its allocations during training. The engine needs its memory when awake. CUDA only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from grpo_mega.distributed.device import PeakMemory

MARGIN = 0.08  # share of the device's memory to leave free for fragmentation, NCCL's buffers and longer batches


class GpuMemory:
    def __init__(self, device: torch.device, engine_bytes: int, peak: PeakMemory) -> None:
        """`engine_bytes`: memory of the engine when awake, measured at its start."""
        self._peak = peak
        self._engine_bytes = engine_bytes
        self._training_bytes = 0
        self._total_bytes = torch.cuda.get_device_properties(device).total_memory

    @contextmanager
    def peak_of_training(self) -> Iterator[None]:
        self._peak.take()
        self._peak.reserved = 0
        yield
        self._peak.take()
        self._training_bytes = max(self._training_bytes, self._peak.reserved)

    def both_fit(self) -> bool:
        """Return True if both fit on every rank and leave MARGIN of the device free. All ranks call it together."""
        is_enough = self._training_bytes + self._engine_bytes <= (1 - MARGIN) * self._total_bytes
        answer = torch.tensor([int(is_enough)])
        dist.all_reduce(answer, op=dist.ReduceOp.MIN)
        return bool(answer)

    def summary(self) -> str:
        gib = 2**30
        return (
            f"training peaks at {self._training_bytes / gib:.1f} GiB, the engine holds {self._engine_bytes / gib:.1f} GiB, "
            f"of {self._total_bytes / gib:.1f} GiB"
        )
