"""Send the policy's weights to the engine. Each engine rank gets its slices, in buckets, and verifies them.

The plan is made once, because neither layout changes. Every rank takes part in every sync. While the engine loads one bucket,
the next bucket is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.errors import SyncError
from grpo_mega.weights.apply import buckets
from grpo_mega.weights.plan import Plan

if TYPE_CHECKING:
    from grpo_mega.rollout.engine import Engine

MAX_NAMED = 8  # maximum number of tensors in an error
AllGather = Callable[[str, list[str]], list[list[str]]]  # (phase, value of this rank) -> values of all ranks


class WeightSync:
    def __init__(
        self,
        plan: Plan,
        dtype: torch.dtype,
        bucket_bytes: int,
        all_gather: AllGather,
        *,
        verify: bool = True,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        """`dtype`: the engine's dtype, for tensors that the plan does not quantise. `verify`: send and compare checksums.

        `ranks`: the group of all ranks of the plan; None for the default group.
        """
        self._plan, self._dtype, self._bucket_bytes, self._verify = plan, dtype, bucket_bytes, verify
        self._all_gather, self._ranks = all_gather, ranks

    def sync_weights(self, tensors: Mapping[str, Tensor], engine: Engine, *, version: int) -> int:
        """Fill the engine from the policy's `tensors` on all ranks. Return the bytes that this rank received from other ranks.

        Raise SyncError with names of tensors on all ranks, if the engine's tensors do not match the plan or a checksum differs.
        """
        self._check("starting a sync", engine.start_update(), "the engine's tensors do not match the plan")
        num_bytes = 0
        for bucket in buckets(
            self._plan,
            tensors,
            dtype=self._dtype,
            bucket_bytes=self._bucket_bytes,
            allocate=engine.allocate,
            group=self._ranks,
            verify=self._verify,
        ):
            engine.load(bucket)
            num_bytes += bucket.num_bytes_received
        self._check("ending a sync", engine.end_update(version), f"the engine does not have policy version {version}")
        return num_bytes

    def _check(self, phase: str, problems: list[str], summary: str) -> None:
        """Raise SyncError on all ranks with the problems of the first rank that has any."""
        for rank, names in enumerate(self._all_gather(phase, problems)):
            if names:
                more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
                raise SyncError(f"{summary}, at rank {rank}: {'; '.join(names[:MAX_NAMED])}{more}; start again with --resume")
