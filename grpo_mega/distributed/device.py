"""The device, CPU or CUDA, and its memory. Only this module selects the device, so the same code runs on 1 CPU and 64
GPUs.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from grpo_mega.distributed.environment import unusable_gpu_problems
from grpo_mega.errors import ConfigError


@dataclass(frozen=True)
class Device:
    type: Literal["cpu", "cuda"]
    torch_device: torch.device

    @property
    def backend(self) -> str:
        """Return the process group's backend. On GPUs gloo exchanges host tensors."""
        return "gloo" if self.type == "cpu" else "cpu:gloo,cuda:nccl"

    @property
    def is_cuda(self) -> bool:
        return self.type == "cuda"

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the GPU's compute capability; None on a CPU."""
        return torch.cuda.get_device_capability(self.torch_device) if self.is_cuda else None

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "a CPU"


class PeakMemory:
    """The peak memory since the last `take`: of tensors on a GPU, of this process (resident) on a CPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.reserved = 0  # peak bytes that torch's allocator reserved on a GPU since this was last set to 0
        self.take()

    def take(self) -> int:
        """Return the peak in bytes and reset it."""
        if self._device.is_cuda:
            device = self._device.torch_device
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved(device))
            peak = torch.cuda.max_memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            return peak
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
        with contextlib.suppress(OSError):  # without permission the peak is not reset
            Path("/proc/self/clear_refs").write_text("5")
        return peak


def select(choice: Literal["auto", "cpu", "cuda"], local_rank: int) -> Device:
    """Return the device of this rank. Raise ConfigError if CUDA is requested but missing, or if torch cannot use a
    GPU.
    """
    has_cuda = torch.cuda.is_available()
    for problem in unusable_gpu_problems(choice, os.environ, sees_gpu=has_cuda):
        raise ConfigError(problem)
    if choice == "cpu" and has_cuda:
        raise ConfigError("device='cpu' on a machine with a GPU: hide the GPU instead (CUDA_VISIBLE_DEVICES='')")
    if not has_cuda:
        return Device("cpu", torch.device("cpu"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}; start fewer ranks per node"
        )
    torch.cuda.set_device(local_rank)
    return Device("cuda", torch.device("cuda", local_rank))
