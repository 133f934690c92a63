"""An SGLang server as the engine of `tp` neighbouring ranks, on their own devices.

The first of these ranks, the leader, starts the server, drives it and stops it; the others lend their memory and hand it the
buckets of a sync. What goes wrong with a server is noted in `failure`, never raised from the middle of what other ranks are
doing with this one; they learn of it when they meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import OnSample, Sampling, Until
from grpo_mega.rollout.sglang.buckets import DeviceBuckets, HostBuckets
from grpo_mega.rollout.sglang.dispatch import drive
from grpo_mega.rollout.sglang.link import Call, Limits, ServerLink
from grpo_mega.rollout.sglang.server import ServerSettings
from grpo_mega.rollout.sglang.update import Place, Update
from grpo_mega.types import Group, Prompt
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import ShardLayout

SEEDED_BY = "enable_deterministic_inference"  # the server argument with which SGLang draws each sample from its own seed
TAGS = ("weights", "kv_cache")  # what sleeps apart


@dataclass(frozen=True)
class Options:
    limits: Limits
    num_engines: int
    prove: bool  # compare checksums after each sync
    on_wait: Callable[[float], None]  # told the seconds that a server has taken to start so far


class SGLangEngine:
    def __init__(
        self,
        settings: ServerSettings,
        options: Options,
        place: Place,
        side: ShardLayout,
        rendezvous: Rendezvous,
        buckets: HostBuckets | DeviceBuckets,
    ) -> None:
        """Begins to start the server, where this rank leads; `wait_until_ready` ends that."""
        self.version = -1
        self._settings, self._options, self._place, self._side, self._rendezvous = settings, options, place, side, rendezvous
        self._buckets = buckets
        self._holding = side.rank_shards(place.rank)
        self._is_blank = True  # the server has had no weights yet
        self._updates = self._phases = self._switches = 0
        self._update: Update | None = None
        self._link: ServerLink | None = None
        if place.is_leader:
            is_seeded = bool(settings.extra.get(SEEDED_BY, False))
            self._link = ServerLink(settings, options.limits, is_seeded=is_seeded)
            self._link.start()

    @property
    def failure(self) -> str | None:
        return self._link.failure if self._link else None

    def wait_until_ready(self) -> None:
        """Raises EngineError on the leader if the server does not come up. A second call does nothing."""
        if self._link and not self._link.is_ready:
            self._link.wait_until_ready(self._options.on_wait)

    def revive(self, failed: Collection[int]) -> None:
        if self._place.leader not in failed:
            return
        self.version, self._is_blank = -1, True
        if self._link:
            self._link.restart(self._options.on_wait)

    def close(self) -> None:
        if self._link:
            self._link.close()
        self._buckets.close()

    def generate(
        self,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        until: Until | None = None,
    ) -> dict[int, Group]:
        self._check_lengths(prompts, sampling)
        self._phases += 1
        if self._link is None:
            return {}
        counter = f"prompts/{self._phases}"
        fair_share = math.ceil(len(prompts) / self._options.num_engines)
        return drive(
            self._link,
            prompts,
            sampling,
            step,
            take=lambda: self._rendezvous.fetch_add(counter),
            most_groups=max(1, min(fair_share, self._options.limits.max_concurrent // sampling.group_size)),
            on_sample=on_sample,
            until=until,
        )

    def _check_lengths(self, prompts: Mapping[int, Prompt], sampling: Sampling) -> None:
        """Before anything is sent. Raises EngineError for a prompt whose longest response would not fit."""
        for prompt in prompts.values():
            longest = len(prompt.token_ids) + sampling.max_response_length
            if longest > self._settings.context_length:
                raise EngineError(
                    f"prompt {prompt.id} of {len(prompt.token_ids)} tokens and a response of {sampling.max_response_length} "
                    f"exceed the engine's {self._settings.context_length}; lower data.max_prompt_length"
                )

    def sleep(self) -> None:
        self._switch("going to sleep", lambda api: api.release(list(TAGS)))

    def wake_weights(self) -> None:
        self._switch("waking its weights", lambda api: api.resume([TAGS[0]]))

    def wake_cache(self) -> None:
        self._switch("waking its cache", lambda api: api.resume([TAGS[1]]))
        self._switch("flushing its cache", lambda api: api.flush_cache())

    def _switch(self, phase: str, call: Call) -> None:
        """Has the leader make a call, for which the other ranks of the engine wait; nothing without a memory saver."""
        if not self._settings.has_memory_saver:
            return
        self._switches += 1
        key = f"switch/{self._switches}/{self._place.engine}"
        if self._link:
            self._link.attempt(phase, call)
            self._rendezvous.set(key, "")
        else:
            self._rendezvous.get(key, f"the leader of its engine, {phase}", self._deadline_s)

    @property
    def _deadline_s(self) -> float:
        """Longer than the leader waits for its server."""
        return 2 * self._options.limits.stall_deadline_s + 10.0

    def shard_layout(self) -> ShardLayout:
        return self._side

    def begin_update(self) -> list[str]:
        self._updates += 1
        self._update = update = Update(
            self._updates,
            self._place,
            self._link,
            self._rendezvous,
            self._buckets,
            self._settings.folder,
            self._deadline_s,
            prove=self._options.prove,
        )
        update.begin()
        blocks = self._side.quantised_shards(self._place.rank) if self._settings.holds_blocks else {}
        problems = update.check(self._holding, blocks, self._dtype) if self._is_blank else []
        self._is_blank = self._is_blank and bool(problems or self.failure)
        return problems

    @property
    def _dtype(self) -> torch.dtype:
        found = getattr(torch, self._settings.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        assert self._update is not None
        return self._update.allocate(index, num_bytes)

    def load(self, bucket: Bucket) -> None:
        assert self._update is not None
        self._update.load(bucket)

    def end_update(self, version: int) -> list[str]:
        assert self._update is not None
        problems = self._update.end(version)
        self._update = None
        if not problems and self.failure is None:
            self.version = version
        return problems
