"""Publishing the policy: the trainer's slices go to the engine ranks that want them, in buckets, and provably arrive.

The plan is made once, since neither layout changes. Every rank takes part in every `publish`. Each engine rank receives its own
slices only; while one bucket is loaded by the engine, the next is filled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from grpo_mega.errors import SyncError
from grpo_mega.weights.apply import Bucket, buckets
from grpo_mega.weights.plan import Plan

MAX_NAMED = 8  # tensors in an error
Meet = Callable[[str, list[str]], list[list[str]]]  # (phase, what this rank brings) -> what every rank brought


class Source(Protocol):
    def tensors(self) -> Mapping[str, Tensor]: ...


class Target(Protocol):
    def begin_update(self) -> list[str]: ...

    def allocate(self, index: int, num_bytes: int) -> Tensor: ...

    def load(self, bucket: Bucket) -> None: ...

    def end_update(self, version: int) -> list[str]: ...


class WeightSync:
    def __init__(self, plan: Plan, dtype: torch.dtype, bucket_bytes: int, meet: Meet, *, prove: bool = True) -> None:
        """`dtype`: the engine's, of what the plan does not quantise. `meet` lets all ranks learn what each has to say.

        Without `prove` no checksums are sent.
        """
        self._plan, self._dtype, self._bucket_bytes, self._meet = plan, dtype, bucket_bytes, meet
        self._prove = prove

    def publish(self, policy: Source, engine: Target, *, version: int) -> int:
        """Fills the engine. Returns the bytes that this rank received from others.

        Raises SyncError on all ranks, naming tensors, if the engine's are not those of the plan or if one did not arrive whole.
        """
        self._raise_first("beginning a sync", engine.begin_update(), "the engine's tensors are not those of the plan")
        num_bytes = 0
        for bucket in buckets(
            self._plan,
            policy.tensors(),
            dtype=self._dtype,
            bucket_bytes=self._bucket_bytes,
            allocate=engine.allocate,
            prove=self._prove,
        ):
            engine.load(bucket)
            num_bytes += bucket.num_bytes_received
        self._raise_first("ending a sync", engine.end_update(version), f"policy version {version} is not what the engine has")
        return num_bytes

    def _raise_first(self, phase: str, problems: list[str], what: str) -> None:
        for rank, found in enumerate(self._meet(phase, problems)):
            if found:
                more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
                raise SyncError(f"{what}, at rank {rank}: {'; '.join(found[:MAX_NAMED])}{more}; start again with --resume")
