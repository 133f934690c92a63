"""The ranks that share one engine, on one node. They exchange texts in a separate store.

The job's store is one process for all ranks, and a sync of a large model would send it thousands of requests per engine. A
process group of these ranks does not work. torch names it by the number of groups that a rank is in, and this number differs
between stages of Megatron's pipelines, so the ranks would wait for each other under different names.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistError, TCPStore

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.distributed.store import LOOPBACK, open_store
from grpo_mega.errors import EngineError


class EngineRanks:
    """`size` consecutive ranks of the job. This rank is number `index`. All of them call every method together."""

    def __init__(self, job: Rendezvous, index: int, size: int, deadline_s: float) -> None:
        self._job, self._index, self._size, self._deadline_s = job, index, size, deadline_s
        self._met: tuple[Rendezvous, TCPStore] | None = None  # the leader's store ends with this object

    def gather(self, phase: str, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order. Raise EngineError if one does not arrive before the deadline."""
        if self._size == 1:
            return [text]
        try:
            if self._met is None:
                self._met = self._meet()
            return self._met[0].all_gather(phase, text, self._deadline_s)
        except DistError as error:
            leader = self._job.rank - self._index
            raise EngineError(f"rank {leader}, the leader of an engine, is gone: {phase} ({error}); see its log") from None

    def broadcast(self, phase: str, text: str) -> str:
        """Return the text of the leader, the first rank."""
        return self.gather(phase, text)[0]

    def _meet(self) -> tuple[Rendezvous, TCPStore]:
        leader, leads = self._job.rank - self._index, self._index == 0
        key, timeout = f"the store of rank {leader}", timedelta(seconds=self._deadline_s)
        if leads:
            store = open_store(LOOPBACK, 0, timeout)
            self._job.set(key, str(store.port))
        else:
            port = int(self._job.get(key, self._deadline_s))
            store = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timeout)
        met = Rendezvous(store, self._job.rank, self._size, first=leader, scope=f"engine of rank {leader}")
        met.all_gather("meeting the other ranks of an engine", None, self._deadline_s)
        if leads:
            self._job.delete(key)
        return met, store
