"""Weights from a seed instead of a checkpoint: the same numbers in every layout, since each tensor has a stream of its own."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from grpo_mega.weights.boxes import Box, Index, region


def random_reader(tensors: Mapping[str, Index], seed: int, std: float) -> Callable[[Box], Tensor]:
    """Reads boxes of random tensors: norms 1, biases 0, all else normal with deviation `std`. For small models: every read
    draws the whole tensor."""

    def read(box: Box) -> Tensor:
        if box.tensor.endswith("norm.weight"):
            return torch.ones(box.shape)
        if box.tensor.endswith(".bias"):
            return torch.zeros(box.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{box.tensor}".encode()))
        return torch.normal(0.0, std, tensors[box.tensor], generator=generator)[region(box.start, box.shape)]

    return read
