"""End a generation phase once enough groups are done over all ranks, or once the trainer is ready for other weights."""

from __future__ import annotations

from collections.abc import Collection

from grpo_mega.distributed.rendezvous import Rendezvous


class StopCondition:
    """Met once `wanted` groups are done over all ranks, and those of `needed`. Every rank makes its own at the same time.

    `clock` is the engine's own measure of its progress in this phase, which grows equally on all ranks: the embedded engine
    counts the tokens that it has decoded one after the other, so that the groups that count as first do not depend on the speed
    of a rank. A server has no such clock: it is 0 for all of its groups, and any `wanted` of them are the first.
    """

    def __init__(self, rendezvous: Rendezvous, wanted: int, needed: Collection[int] = ()) -> None:
        """`needed`: keys of groups without which the phase does not end."""
        self.clocks: dict[int, int] = {}  # of the groups that this rank finished, by key
        # Clocks at which this rank began or continued samples, by key of the group and index; empty without a clock.
        self.begun: dict[tuple[int, int], int] = {}
        self._rendezvous, self._wanted, self._needed = rendezvous, wanted, frozenset(needed)
        self._name = rendezvous.unique_key("stop_condition")
        self._own_keys: list[str] = []
        self._known: list[tuple[int, int]] = []  # clock and key of all ranks' groups

    def done(self, key: int, clock: int = 0) -> None:
        """Report a group of which all samples have ended."""
        self.clocks[key] = clock
        self._own_keys.append(f"{self._name}/{self._rendezvous.fetch_add(self._name)}")
        self._rendezvous.set(self._own_keys[-1], f"{clock} {key}")

    def is_met(self, clock: int = 0) -> bool:
        """Return True once the engine is to end what it has under way; cheap enough to be asked between two tokens.

        A rank may go on for a while before it learns of other ranks' groups; that does not change which groups are first.
        """
        while (text := self._rendezvous.try_get(f"{self._name}/{len(self._known)}")) is not None:
            done_at, key = map(int, text.split())
            self._known.append((done_at, key))
        end = self.end(self._known)
        return end is not None and end <= clock

    def end(self, done: Collection[tuple[int, int]]) -> int | None:
        """Return the clock at which the phase ends, from (clock, key) of groups that are done; None if it does not end yet."""
        first = sorted(clock for clock, _ in done)[: self._wanted]
        needed = [clock for clock, key in done if key in self._needed]
        if len(first) < self._wanted or len(needed) < len(self._needed):
            return None
        return max([*first, *needed], default=0)

    def close(self) -> None:
        """Delete this rank's keys from the store, once no rank asks any more."""
        for key in (*self._own_keys, self._name):
            self._rendezvous.delete(key)


class UntilTrained(StopCondition):
    """Met once all `num_trainers` ranks that train have arrived, however many groups are done."""

    def __init__(self, rendezvous: Rendezvous, num_trainers: int) -> None:
        super().__init__(rendezvous, wanted=0)
        self._num_trainers = num_trainers

    def arrive(self) -> None:
        self._rendezvous.fetch_add(self._name, limit=self._num_trainers)

    def done(self, key: int, clock: int = 0) -> None:
        self.clocks[key] = clock

    def is_met(self, clock: int = 0) -> bool:
        return self._rendezvous.fetch_add(self._name, 0, limit=self._num_trainers) >= self._num_trainers

    def end(self, done: Collection[tuple[int, int]]) -> int | None:
        return None
