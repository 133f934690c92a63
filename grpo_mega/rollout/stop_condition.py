"""End a generation phase once enough groups are done over all ranks."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from grpo_mega.distributed.rendezvous import Rendezvous


class StopCondition:
    """Met once `wanted` groups are done over all ranks. Every rank makes its own at the same time.

    `clock` is the engine's own measure of its progress in this phase, which grows equally on all ranks: the embedded engine
    counts the tokens that it has decoded one after the other, so that the groups that count as first do not depend on the speed
    of a rank. A server has no such clock: it is 0 for all of its groups, and any `wanted` of them are the first.
    """

    def __init__(self, rendezvous: Rendezvous, wanted: int) -> None:
        self.clocks: dict[int, int] = {}  # of the groups that this rank finished, by key
        self.lengths: dict[int, Sequence[int]] = {}  # of the groups that it aborted
        self._rendezvous, self._wanted = rendezvous, wanted
        self._name = rendezvous.unique_key("stop_condition")
        self._own_keys: list[str] = []
        self._known: list[int] = []  # clocks of all ranks' groups, ascending

    def done(self, key: int, clock: int = 0) -> None:
        """Report a group of which all samples have ended."""
        self.clocks[key] = clock
        self._own_keys.append(f"{self._name}/{self._rendezvous.fetch_add(self._name)}")
        self._rendezvous.set(self._own_keys[-1], str(clock))

    def is_met(self, clock: int = 0) -> bool:
        """Return True once the engine is to end what it has under way; cheap enough to be asked between two tokens.

        A rank may go on for a while before it learns of other ranks' groups; that does not change which groups are first.
        """
        while (text := self._rendezvous.try_get(f"{self._name}/{len(self._known)}")) is not None:
            insort(self._known, int(text))
        return bisect_right(self._known, clock) >= self._wanted

    def aborted(self, key: int, lengths: Sequence[int]) -> None:
        """Report a group that was begun and not finished, with the response tokens so far of each sample.

        Nothing else of it is kept. Partial rollouts would begin here: given the samples themselves, the next phase could
        continue them.
        """
        self.lengths[key] = lengths

    def close(self) -> None:
        """Delete this rank's keys from the store, once no rank asks any more."""
        for key in (*self._own_keys, self._name):
            self._rendezvous.delete(key)
