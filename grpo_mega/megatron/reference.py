"""The reference of the KL penalty: weights in host memory. They start as the start model's and can follow the policy.

A refresh sets them to alpha * policy + (1 - alpha) * reference, alpha = algorithm.ref_model_mixup_alpha (DeepSeekMath, arXiv
2402.03300, algorithm 1, and TRL's `sync_ref_model`). At alpha 1 they equal the policy, bit for bit. Below 1 the average is kept
in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_mega.config import AlgorithmConfig
from grpo_mega.megatron.offload import PolicyMemory


class Reference:
    def __init__(self, memory: PolicyMemory, parameters: Mapping[str, Tensor], algorithm: AlgorithmConfig) -> None:
        """Copy the current weights. They must be on the device here and in every method."""
        self.weights = memory.copy_weights()  # input of PolicyMemory.with_weights
        self._memory, self._parameters, self._alpha = memory, parameters, algorithm.ref_model_mixup_alpha
        self._average = self._copied(torch.float32) if algorithm.averages_reference else None

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the reference from the policy once."""
        if self._average is None:
            self._memory.copy_weights(self.weights)
            return
        for name, average in self._average.items():
            average.mul_(1 - self._alpha).add_(self._parameters[name].detach().cpu(), alpha=self._alpha)
        self._put(self._average)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, on the host, by parameter name: the fp32 average, else copies of the weights."""
        if self._average is not None:
            return self._average
        with self._memory.with_weights(self.weights):
            return self._copied()

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of a checkpoint."""
        if self._average is not None:
            self._average = {name: tensor.to("cpu", torch.float32) for name, tensor in tensors.items()}
        self._put(tensors)

    def _copied(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {name: p.detach().to("cpu", dtype or p.dtype, copy=True) for name, p in self._parameters.items()}

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        with self._memory.borrowed():
            for name, p in self._parameters.items():
                p.copy_(tensors[name])
            self._memory.copy_weights(self.weights)
