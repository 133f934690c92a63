"""An SGLang server as the engine of `rollout.tp` neighbouring ranks, on their own devices.

The first of these ranks, the leader, starts the server, calls it and stops it; the others give their memory and their buckets
of a sync. A failure of the server is noted in `failure` and never raised inside a collective of other ranks; they learn of it
at the next rendezvous.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import OnSample, Sampling
from grpo_mega.rollout.sglang.buckets import DeviceBuckets, HostBuckets
from grpo_mega.rollout.sglang.client import Client
from grpo_mega.rollout.sglang.settings import EngineSettings
from grpo_mega.rollout.sglang.update import Update
from grpo_mega.rollout.stop_condition import StopCondition
from grpo_mega.types import Group, Prompt
from grpo_mega.weights.apply import Bucket
from grpo_mega.weights.layout import ShardLayout

WEIGHTS, CACHE = "weights", "kv_cache"  # parts of a server's memory that sleep separately


class SGLangEngine:
    is_server = True

    def __init__(
        self, settings: EngineSettings, side: ShardLayout, rendezvous: Rendezvous, buckets: HostBuckets | DeviceBuckets
    ) -> None:
        """Begin to start the server, where this rank leads; `wait_until_ready` finishes that."""
        self.version = -1
        self._settings, self._side, self._rendezvous, self._buckets = settings, side, rendezvous, buckets
        self._has_weights = False
        self._num_updates = self._num_phases = self._num_switches = 0
        self._update: Update | None = None
        self._client = Client(settings) if settings.is_leader else None

    @property
    def failure(self) -> str | None:
        return self._client.failure if self._client else None

    def wait_until_ready(self) -> None:
        """Raise EngineError on the leader if the server does not come up. A second call does nothing."""
        if self._client:
            self._client.wait_until_ready()

    def restart(self, failed: Collection[int]) -> None:
        if self._settings.leader in failed:
            self.version, self._has_weights = -1, False
            if self._client:
                self._client.restart()

    def close(self) -> None:
        if self._client:
            self._client.close()
        self._buckets.close()

    def generate(
        self,
        prompts: Mapping[int, Prompt],
        sampling: Sampling,
        *,
        step: int,
        on_sample: OnSample,
        stop: StopCondition | None = None,
    ) -> dict[int, Group]:
        """Take no more groups at once than an equal share of all, so that the first engine does not take everything."""
        self._check_lengths(prompts, sampling)
        self._num_phases += 1
        if self._client is None:
            return {}
        counter = f"prompts/{self._num_phases}"
        equal_share = math.ceil(len(prompts) / self._settings.num_engines)
        return self._client.generate(
            prompts,
            sampling,
            step,
            next_number=lambda: self._rendezvous.fetch_add(counter),
            max_groups=max(1, min(equal_share, self._settings.rollout.max_concurrent // sampling.group_size)),
            on_sample=on_sample,
            stop=stop,
        )

    def _check_lengths(self, prompts: Mapping[int, Prompt], sampling: Sampling) -> None:
        """Raise EngineError, before anything is sent, for a prompt whose longest response would not fit."""
        for prompt in prompts.values():
            longest = len(prompt.token_ids) + sampling.max_response_length
            if longest > self._settings.context_length:
                raise EngineError(
                    f"prompt {prompt.id} of {len(prompt.token_ids)} tokens and a response of {sampling.max_response_length} "
                    f"exceed the engine's {self._settings.context_length}; lower data.max_prompt_length"
                )

    def sleep(self) -> None:
        """The server must be idle; otherwise it would end itself."""
        self._switch("going to sleep", "/release_memory_occupation", {"tags": [WEIGHTS, CACHE]})

    def wake_weights(self) -> None:
        self._switch("waking its weights", "/resume_memory_occupation", {"tags": [WEIGHTS]})

    def wake_cache(self) -> None:
        self._switch("waking its cache", "/resume_memory_occupation", {"tags": [CACHE]})
        self._switch("flushing its cache", "/flush_cache", {})

    def _switch(self, phase: str, path: str, body: dict[str, Any]) -> None:
        """Call the server from the leader, while the other ranks of the engine wait; do nothing without a memory saver."""
        if not self._settings.has_memory_saver:
            return
        self._num_switches += 1
        key = f"switch/{self._num_switches}/{self._settings.engine}"
        if self._client:
            self._client.post(phase, path, body)
            self._rendezvous.set(key, "")
        else:
            self._rendezvous.get(key, f"the leader of its engine, {phase}", self._settings.leader_deadline_s)

    def shard_layout(self) -> ShardLayout:
        return self._side

    def begin_update(self) -> list[str]:
        self._num_updates += 1
        self._update = Update(self._num_updates, self._settings, self._client, self._rendezvous, self._buckets)
        self._update.begin()
        if self._has_weights:
            return []
        rank = self._settings.rank
        blocks = self._side.quantised_shards(rank) if self._settings.holds_blocks else {}
        problems = self._update.check(self._side.rank_shards(rank), blocks)
        self._has_weights = not problems and self.failure is None
        return problems

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
