"""CPU or CUDA: the one place that asks which, so that the same code runs on a laptop and on 64 GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from grpo_mega.errors import ConfigError


@dataclass(frozen=True)
class Device:
    type: Literal["cpu", "cuda"]
    torch_device: torch.device

    @property
    def backend(self) -> str:
        """The process group's backend. On GPUs gloo serves what is exchanged as host tensors."""
        return "gloo" if self.type == "cpu" else "cpu:gloo,cuda:nccl"

    @property
    def is_cuda(self) -> bool:
        return self.type == "cuda"


def select(choice: Literal["auto", "cpu", "cuda"], local_rank: int) -> Device:
    """The device of this rank. Raises ConfigError if CUDA is asked for and absent."""
    has_cuda = torch.cuda.is_available()
    if choice == "cuda" and not has_cuda:
        raise ConfigError("device='cuda', but torch sees no GPU here; use device=auto or device=cpu")
    if choice == "cpu" and has_cuda:
        raise ConfigError("device='cpu' on a machine with a GPU: hide the GPU instead (CUDA_VISIBLE_DEVICES='')")
    if not has_cuda:
        return Device("cpu", torch.device("cpu"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}; start fewer ranks a node"
        )
    torch.cuda.set_device(local_rank)
    return Device("cuda", torch.device("cuda", local_rank))
