"""When to end a generation phase: enough groups are done over all ranks, or the trainer is ready to sync new weights."""

from __future__ import annotations

from collections.abc import Collection

from grpo_mega.distributed.rendezvous import Rendezvous


class StopCondition:
    """Met when at least `wanted` groups and all groups in `needed` are done over all ranks. All ranks construct it together.

    `clock` is the engine's measure of progress in this phase. It advances equally on all ranks: the embedded engine counts its
    sequential decoding steps, so the first groups do not depend on the speed of a rank. A server has no such clock. Its groups
    have clock 0, and any `wanted` of them count as the first.
    """

    def __init__(self, rendezvous: Rendezvous, wanted: int, needed: Collection[int] = ()) -> None:
        """`needed`: keys of groups that must be done before the phase ends."""
        self.clocks: dict[int, int] = {}  # clock when this rank finished each group, by group key
        # Clock when this rank started or continued each sample, by group key and sample index. Empty if there is no clock.
        self.start_clocks: dict[tuple[int, int], int] = {}
        self._rendezvous, self._wanted, self._needed = rendezvous, wanted, frozenset(needed)
        self._name = rendezvous.unique_key("stop_condition")
        self._own_keys: list[str] = []
        self._known: list[tuple[int, int]] = []  # (clock, key) of each done group on any rank, as far as read

    def done(self, key: int, clock: int = 0) -> None:
        """Report a group when all its samples have ended."""
        self.clocks[key] = clock
        self._own_keys.append(f"{self._name}/{self._rendezvous.fetch_add(self._name)}")
        self._rendezvous.set(self._own_keys[-1], f"{clock} {key}")

    def is_met(self, clock: int = 0) -> bool:
        """Return True if the engine must stop its running samples. The call is cheap enough to repeat for every token.

        A rank may continue for a while before it learns of other ranks' groups. The delay does not change the choice of groups.
        """
        while (text := self._rendezvous.try_get(f"{self._name}/{len(self._known)}")) is not None:
            done_at, key = map(int, text.split())
            self._known.append((done_at, key))
        end = self.end(self._known)
        return end is not None and end <= clock

    def end(self, done: Collection[tuple[int, int]]) -> int | None:
        """Return the clock at which the phase ends, from (clock, key) of the done groups; None if it continues."""
        first = sorted(clock for clock, _ in done)[: self._wanted]
        needed = [clock for clock, key in done if key in self._needed]
        if len(first) < self._wanted or len(needed) < len(self._needed):
            return None
        return max([*first, *needed], default=0)

    def close(self) -> None:
        """Delete this rank's keys from the store. Call this when no rank reads them any more."""
        for key in (*self._own_keys, self._name):
            self._rendezvous.delete(key)


class StopWhenTrainersArrive(StopCondition):
    """Met when all `num_trainers` ranks that train have arrived, however many groups are done."""

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
