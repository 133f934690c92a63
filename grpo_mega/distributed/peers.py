"""The ranks that share one engine, on one node: they exchange texts among themselves, without the job's store.

The store is one process for the whole job; a sync of a large model would bring it thousands of requests per engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist

from grpo_mega.errors import EngineError

PEERS = "peers"  # description of these groups, which outlive an arrangement of Megatron's


class Peers:
    """Ranks leader, ..., leader + size - 1 of the job. All of them call every method together."""

    def __init__(self, leader: int, size: int, deadline_s: float) -> None:
        self._leader, self._size, self._deadline_s = leader, size, deadline_s

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        ranks, timeout = list(range(self._leader, self._leader + self._size)), timedelta(seconds=self._deadline_s)
        return dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True, group_desc=PEERS)

    def gather(self, phase: str, text: str) -> list[str]:
        """Return the texts of all ranks, in their order, on the leader; an empty list on the others."""
        if self._size == 1:
            return [text]
        texts: list[str] | None = [""] * self._size if dist.get_rank() == self._leader else None
        with self._named(phase):
            dist.gather_object(text, texts, dst=self._leader, group=self._group)
        return texts or []

    def broadcast(self, phase: str, text: str) -> str:
        """Return the leader's text."""
        if self._size == 1:
            return text
        texts = [text]
        with self._named(phase):
            dist.broadcast_object_list(texts, src=self._leader, group=self._group)
        return texts[0]

    @contextmanager
    def _named(self, phase: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # a rank is gone, or the deadline has passed
            last = self._leader + self._size - 1
            raise EngineError(
                f"ranks {self._leader} to {last} of an engine did not meet within {self._deadline_s:.0f} s, {phase} ({error}); "
                "see their logs in RUN_DIR/logs"
            ) from None
