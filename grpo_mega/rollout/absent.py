"""The engine of a rank that only trains. It takes part in phases and syncs, but has no weights and generates nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_mega.rollout.engine import Engine, Sampling
from grpo_mega.types import Group, Prompt
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import ShardLayout


class NoEngine(Engine):
    is_absent = True

    def __init__(self, side: ShardLayout, device: torch.device) -> None:
        """`side`: the layout of the engine ranks."""
        self._side, self._device = side, device

    def generate(self, prompts: Mapping[int, Prompt], sampling: Sampling, **others: Any) -> dict[int, Group]:
        return {}

    def shard_layout(self) -> ShardLayout:
        return self._side

    def start_update(self) -> list[str]:
        return []

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def load(self, bucket: Bucket) -> None:
        assert not bucket.entries, "a rank without an engine received weights"

    def end_update(self, version: int) -> list[str]:
        self.version = version
        return []
