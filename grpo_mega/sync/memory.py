"""Measure the GPU memory of policy and engine, and decide if both fit on a device at once; the same answer on all ranks.

The policy's need is the peak of its own allocations while it trained; the engine's is what it holds when awake. CUDA only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from grpo_mega.hardware.device import PeakMemory

MARGIN = 0.08  # of the device, left for fragmentation, NCCL's buffers and longer batches


class GpuMemory:
    def __init__(self, device: torch.device, engine_bytes: int, peak: PeakMemory) -> None:
        """`engine_bytes`: held by the engine when awake, measured at its start."""
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
        """Return True if both fit on every rank with MARGIN of the device to spare; all ranks ask together."""
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
