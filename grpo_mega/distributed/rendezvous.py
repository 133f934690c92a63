"""Exchange small values between ranks over the job's store, with no collective outstanding.

A generation phase may last longer than the watchdogs of NCCL and gloo allow, so ranks wait for each other here: each sets keys
and polls for those that it needs. Every wait has a deadline, past which EngineError names the rank and the phase.
"""

from __future__ import annotations

import json
import time
from typing import Any

from torch.distributed import Store

from grpo_mega.errors import EngineError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05


class Rendezvous:
    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self.rank, self.world_size = rank, world_size
        self._num_gathers = self._num_keys = 0

    def all_gather(self, phase: str, value: Any, deadline_s: float) -> list[Any]:
        """Return every rank's value, once all ranks have called; values are JSON. All ranks call equally often."""
        self._num_gathers += 1
        prefix, until = f"gather/{self._num_gathers}", time.monotonic() + deadline_s
        self.set(f"{prefix}/{self.rank}", json.dumps(value))
        values = [
            json.loads(self.get(f"{prefix}/{rank}", f"rank {rank} in {phase}", until - time.monotonic()))
            for rank in range(self.world_size)
        ]
        # A rank that calls this has read all values of the call before.
        self.delete(f"gather/{self._num_gathers - 1}/{self.rank}")
        return values

    def unique_key(self, kind: str) -> str:
        """Return a key that was not given before. All ranks call equally often and get the same key."""
        self._num_keys += 1
        return f"{kind}/{self._num_keys}"

    def fetch_add(self, counter: str, count: int = 1) -> int:
        """Add to a counter that all ranks share and that begins at 0; return its value from before."""
        return self._store.add(counter, count) - count

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)

    def get(self, key: str, awaited: str, deadline_s: float) -> str:
        """Return the text of a key, once it is set. Raise EngineError, naming what was `awaited`, after the deadline."""
        until, pause = time.monotonic() + deadline_s, _FIRST_PAUSE_S
        while not self._store.check([key]):
            if time.monotonic() > until:
                raise EngineError(
                    f"rank {self.rank} waited {deadline_s:.0f} s in vain for {awaited}; see that rank's log in RUN_DIR/logs"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self._store.get(key).decode()

    def try_get(self, key: str) -> str | None:
        """Return the text of a key, or None if it is not set."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def delete(self, key: str) -> None:
        self._store.delete_key(key)
