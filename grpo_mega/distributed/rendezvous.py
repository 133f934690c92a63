"""Waiting for other ranks on the job's store, with no collective outstanding.

A generation phase may last longer than the watchdogs of NCCL and gloo allow, so ranks meet here instead: each posts what it has
to say and polls for what it needs. Every wait has a deadline, past which EngineError names the rank and the phase.
"""

from __future__ import annotations

import json
import time
from typing import Any

from torch.distributed import Store

from grpo_mega.errors import EngineError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05


class Board:
    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank, self.world_size = rank, world_size
        self._meetings = self._names = 0

    def meet(self, phase: str, value: Any, deadline_s: float) -> list[Any]:
        """What every rank brought, once all have come; values are JSON. All ranks meet equally often."""
        self._meetings += 1
        self.post(f"meeting/{self._meetings}/{self.rank}", json.dumps(value))
        until = time.monotonic() + deadline_s
        found = [
            json.loads(self.read(f"meeting/{self._meetings}/{rank}", f"rank {rank} in {phase}", until - time.monotonic()))
            for rank in range(self.world_size)
        ]
        # Whoever came here has read all of the meeting before.
        self.forget(f"meeting/{self._meetings - 1}/{self.rank}")
        return found

    def new_name(self, kind: str) -> str:
        """A name that was not given before. All ranks ask equally often, and get the same."""
        self._names += 1
        return f"{kind}/{self._names}"

    def take(self, counter: str, count: int = 1) -> int:
        """The next number of a counter that all ranks share: 0, 1, 2, ...; and the `count` - 1 after it are taken too."""
        return self._store.add(counter, count) - count

    def post(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def read(self, key: str, what: str, deadline_s: float) -> str:
        """The text under a key, once it is there. Raises EngineError, naming `what` was waited for."""
        until, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        while not self._store.check([key]):
            if time.monotonic() > until:
                raise EngineError(
                    f"rank {self.rank} waited in vain for {what}, {deadline_s:.0f} s; see that rank's log in the run's folder"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self._store.get(key).decode()

    def look(self, key: str) -> str | None:
        """The text under a key if it is there; does not wait."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def forget(self, key: str) -> None:
        self._store.delete_key(key)
