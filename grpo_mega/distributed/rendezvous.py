"""Exchange small values between ranks over the job's store, without a pending collective.

A generation phase may last longer than the watchdogs of NCCL and gloo allow, so ranks wait for each other here. Each
rank sends four requests per exchange, for any number of ranks, and waits in the store instead of polling. Every wait
has a deadline. After it EngineError reports the missing ranks and the phase. Values are sealed (messages.py), so values
from other programs are refused, and the error has the key's name. Counters cannot be sealed, so their values are
checked.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import DistError, DistStoreError, Store, TCPStore

from grpo_mega.distributed.messages import forged, seal_value, unseal_value
from grpo_mega.distributed.process_groups import LOOPBACK, open_store
from grpo_mega.errors import EngineError

_MAX_NAMED = 8  # maximum number of missing ranks in an error


class Rendezvous:
    """One of `world_size` ranks that exchange values. The ranks are numbered from `first`."""

    def __init__(self, store: Store, rank: int, world_size: int, *, first: int = 0, scope: str = "job") -> None:
        """`scope` distinguishes this store's keys from equal keys in the run's other stores."""
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # a waiting connection serves no other request
        self.rank, self.world_size, self._ranks = rank, world_size, range(first, first + world_size)
        self._scope = scope
        self._num_gathers = self._num_keys = 0

    def all_gather(self, phase: str, value: Any, deadline_s: float) -> list[Any]:
        """Wait until all ranks have called, and return every rank's value. Values are JSON. All ranks call equally
        often.
        """
        self._num_gathers += 1
        prefix = f"gather/{self._num_gathers}"
        values, count, done = f"{prefix}/values", f"{prefix}/count", f"{prefix}/done"
        self._store.append(values, f"{self.rank} {seal_value(self._name(values, self.rank), value)}\n")  # type: ignore[attr-defined]
        num_come = self._add(count, 1)
        if not 1 <= num_come <= self.world_size:
            raise forged(self._name(count))
        if num_come == self.world_size:
            self._store.set(done, "")
            for name in ("values", "count", "done"):  # all ranks have finished the previous call
                self._store.delete_key(f"gather/{self._num_gathers - 1}/{name}")
        elif not self._is_set(done, deadline_s):
            missing = sorted(set(self._ranks) - self._read(values).keys())
            if not missing:
                raise forged(self._name(count))
            more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
            names = f"rank{'s'[: len(missing) - 1]} {', '.join(map(str, missing[:_MAX_NAMED]))}{more}"
            raise EngineError(
                f"rank {self.rank}: timed out after {deadline_s:.0f} s; missing {names} in {phase}; see RUN_DIR/logs"
            )
        by_rank = self._read(values)
        if len(by_rank) < self.world_size:
            raise forged(self._name(done))
        return [by_rank[rank] for rank in self._ranks]

    def unique_key(self, kind: str) -> str:
        """Return a new unique key. All ranks call equally often and get the same key."""
        self._num_keys += 1
        return f"{kind}/{self._num_keys}"

    def fetch_add(self, counter: str, count: int = 1, limit: int | None = None) -> int:
        """Add to a counter that all ranks share. It starts at 0. Return its value before the addition.

        Raise EngineError if the ranks cannot have counted to the value, for example because it exceeds `limit`.
        """
        after = self._add(counter, count)
        if after < count or (limit is not None and after > limit):
            raise forged(self._name(counter))
        return after - count

    def set(self, key: str, text: str) -> None:
        self._store.set(key, seal_value(self._name(key), text))

    def get(self, key: str, deadline_s: float) -> str:
        """Wait until a key is set, and return its text. Raise EngineError after the deadline."""
        if not self._is_set(key, deadline_s):
            raise EngineError(f"rank {self.rank}: timed out after {deadline_s:.0f} s; missing {key}; see RUN_DIR/logs")
        return str(unseal_value(self._name(key), self._store.get(key)))

    def try_get(self, key: str) -> str | None:
        """Return the text of a key, or None if it is not set."""
        return str(unseal_value(self._name(key), self._store.get(key))) if self._store.check([key]) else None

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def _name(self, key: str, rank: int | None = None) -> str:
        """Return the name to seal a value of this run with."""
        return f"{self._scope}/{key}" if rank is None else f"{self._scope}/{key} of rank {rank}"

    def _read(self, key: str) -> dict[int, Any]:
        """Return the values that ranks have appended to a key so far."""
        by_rank = {}
        for line in self._store.get(key).split(b"\n")[:-1]:
            rank, _, sealed = line.partition(b" ")
            if not rank.isdigit() or int(rank) not in self._ranks:
                raise forged(self._name(key))
            by_rank[int(rank)] = unseal_value(self._name(key, int(rank)), sealed)
        return by_rank

    def _add(self, counter: str, count: int) -> int:
        """Add to a counter. The store closes the connection if the counter is not a number."""
        try:
            return self._store.add(counter, count)
        except DistError as error:
            self._store = self._store.clone()  # type: ignore[attr-defined]
            if not self._store.get(counter).removeprefix(b"-").isdigit():
                raise forged(self._name(counter)) from error
            raise

    def _is_set(self, key: str, deadline_s: float) -> bool:
        """Wait until a key is set. Return False after the deadline. Signals are handled when it returns."""
        try:
            self._store.wait([key], timedelta(seconds=deadline_s))
        except DistStoreError:
            return False
        return True


class EngineRanks:
    """The ranks that share one engine, on one node. They exchange texts in a separate store.

    They are `size` consecutive ranks of the job, and this rank is number `index`. All of them call every method
    together. The job's store is one process for all ranks, and a sync of a large model would send it thousands of
    requests per engine. A process group of these ranks does not work. torch names it by the number of groups that a
    rank is in. This number differs between stages of Megatron's pipelines, so the ranks would wait for each other under
    different names.
    """

    def __init__(self, job: Rendezvous, index: int, size: int, deadline_s: float) -> None:
        self._job, self._index, self._size, self._deadline_s = job, index, size, deadline_s
        self._met: tuple[Rendezvous, TCPStore] | None = None  # the leader's store ends with this object

    def gather(self, phase: str, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order. Raise EngineError if one does not arrive before the
        deadline.
        """
        if self._size == 1:
            return [text]
        leader, leads = self._job.rank - self._index, self._index == 0
        try:
            if self._met is None:
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
                self._met = met, store
            return self._met[0].all_gather(phase, text, self._deadline_s)
        except DistError as error:
            raise EngineError(
                f"rank {leader}, the leader of an engine, is gone: {phase} ({error}); see its log"
            ) from None

    def broadcast(self, phase: str, text: str) -> str:
        """Return the text of the leader, the first rank."""
        return self.gather(phase, text)[0]
