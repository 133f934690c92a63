"""Publishing the policy: the trainer's slices go to the engine tensors that want them, and the engine takes the new version.

The plan is made once, since neither layout changes. Every rank takes part in every `publish`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.errors import SyncError
from grpo_mega.weights.apply import execute
from grpo_mega.weights.boxes import Holding
from grpo_mega.weights.plan import plan


class Source(Protocol):
    def tensors(self) -> Mapping[str, Tensor]: ...


class Target(Protocol):
    version: int

    def tensors(self) -> Mapping[str, Tensor]: ...


class WeightSync:
    def __init__(self, sources: Sequence[Holding], targets: Sequence[Holding], dtype: torch.dtype) -> None:
        """`sources[rank]`, `targets[rank]`: what the trainer's and the engine's side of a rank hold; `dtype`: the engine's."""
        self.transfers = plan(sources, targets)
        self._target_names = [set(h) for h in targets]
        self._dtype = dtype

    def publish(self, policy: Source, engine: Target, *, version: int) -> int:
        """Fills the engine's tensors. Returns the bytes this rank received. Raises SyncError before anything moves."""
        targets = engine.tensors()
        differing = self._target_names[dist.get_rank()] ^ set(targets)
        if differing:
            raise SyncError(
                f"engine and table differ in the tensor {sorted(differing)[0]!r}; use an engine version that was tested"
            )
        received = execute(self.transfers, policy.tensors(), targets, dtype=self._dtype)
        engine.version = version
        return received
