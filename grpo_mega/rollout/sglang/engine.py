"""An SGLang server as the engine of `rollout.tp` neighbouring ranks, on the devices of these ranks.

The first of these ranks, the leader, starts, calls and stops the server. The other ranks release memory for it and fill their
buckets of a sync. A server failure is stored in `failure`, never raised inside a collective. Other ranks learn of the failure
at the next rendezvous. The job's store only counts the prompts, because the engine's ranks have a separate group (EngineRanks).

In a sync each rank describes the bucket that it has filled for its device. The leader gathers these descriptions and posts them
as one request. A bucket is filled again when its request is acknowledged. There are two buffers, so one bucket is loaded while
the next is filled. After the last bucket, the checksums in the buckets are compared with the server's parameters. FP8 blocks
are compared after each bucket, before the server can process them. Their differences are also reported at the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_mega.distributed.peers import EngineRanks
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import NO_EARLIER_GROUPS, Engine, OnSample, Sampling
from grpo_mega.rollout.schedule import schedule_of
from grpo_mega.rollout.sglang.buckets import DeviceBuckets, HostBuckets, payload
from grpo_mega.rollout.sglang.client import Client
from grpo_mega.rollout.sglang.loader import NUM_BUFFERS, report_path
from grpo_mega.rollout.sglang.settings import EngineSettings
from grpo_mega.rollout.stop_condition import StopCondition
from grpo_mega.types import Group, Prompt
from grpo_mega.weights.apply import Bucket, Entry
from grpo_mega.weights.boxes import Index, RankShards
from grpo_mega.weights.fp8_blocks import SCALES, VALUES
from grpo_mega.weights.layout import ShardLayout
from grpo_mega.weights.receive import scales_name
from grpo_mega.weights.spec import FLOAT32, num_blocks

WEIGHTS, CACHE = "weights", "kv_cache"  # parts of a server's memory that sleep separately
Posted = tuple[int, Future[Any] | None]  # number of a request; its response, only on the leader


class SGLangEngine(Engine):
    is_server = True

    def __init__(
        self, settings: EngineSettings, side: ShardLayout, rendezvous: Rendezvous, buckets: HostBuckets | DeviceBuckets
    ) -> None:
        """Launch the server if this rank is the leader, without waiting for it. `wait_until_ready` waits."""
        self._settings, self._side, self._rendezvous, self._buckets = settings, side, rendezvous, buckets
        self._peers = EngineRanks(rendezvous, settings.tp_rank, settings.rollout.tp, settings.leader_deadline_s)
        self._has_weights = False
        self._num_phases = self._num_requests = 0
        self._opened: dict[int, object] = {}  # buffer that the server has opened, by slot
        # The state of the current sync:
        self._posted: list[Posted] = []  # request of each bucket
        self._num_loaded = 0
        self._checksums: list[Entry] = []
        self._differing: list[str] = []  # differences in FP8 blocks that the server has reported, only on the leader
        self._client = Client(settings) if settings.is_leader else None

    @property
    def failure(self) -> str | None:
        return self._client.failure if self._client else None

    def wait_until_ready(self) -> None:
        """Wait for the server's start. Raise EngineError on the leader if it fails. A second call does nothing."""
        if self._client:
            self._client.wait_until_ready()

    def restart(self, failed: Collection[int]) -> None:
        if self._settings.leader in failed:
            self.version, self._has_weights = -1, False
            self._opened.clear()
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
        earlier: Mapping[int, Group] = NO_EARLIER_GROUPS,
    ) -> dict[int, Group]:
        """Generate on the leader. Take at most an equal share of the groups at once, so no engine takes all of them."""
        self._check_lengths(prompts, sampling)
        self._num_phases += 1
        if self._client is None:
            return {}
        counter = f"prompts/{self._num_phases}"
        if self._settings.rank == 0:  # no rank reads the counter of the previous phase any more
            self._rendezvous.delete(f"prompts/{self._num_phases - 1}")
        equal_share = math.ceil(len(prompts) / self._settings.num_engines)
        return self._client.generate(
            prompts,
            sampling,
            step,
            next_number=lambda: self._rendezvous.fetch_add(counter),
            schedule=schedule_of(sampling, self._settings.rollout.max_concurrent, equal_share),
            on_sample=on_sample,
            stop=stop,
            earlier=earlier,
        )

    def _check_lengths(self, prompts: Mapping[int, Prompt], sampling: Sampling) -> None:
        """Raise EngineError if a prompt and its longest response exceed the context length. Nothing has been sent yet."""
        for prompt in prompts.values():
            longest = len(prompt.token_ids) + sampling.max_response_length
            if longest > self._settings.context_length:
                raise EngineError(
                    f"prompt {prompt.id} of {len(prompt.token_ids)} tokens and a response of {sampling.max_response_length} "
                    f"exceed the engine's {self._settings.context_length}; lower data.max_prompt_length"
                )

    def sleep(self) -> None:
        """Wait until the server is idle, then make it sleep. A busy server would end itself.

        With overlapped scheduling the server stays busy for about one decode step after the last sample.
        """

        def act(client: Client) -> None:
            client.flush_cache_when_idle("waiting until it is idle")
            client.post("going to sleep", "/release_memory_occupation", {"tags": [WEIGHTS, CACHE]})

        self._switch("going to sleep", act)

    def wake_weights(self) -> None:
        phase = "waking its weights"
        self._switch(phase, lambda client: client.post(phase, "/resume_memory_occupation", {"tags": [WEIGHTS]}))

    def wake_cache(self) -> None:
        def act(client: Client) -> None:
            client.post("waking its cache", "/resume_memory_occupation", {"tags": [CACHE]})
            client.post("flushing its cache", "/flush_cache", {})

        self._switch("waking its cache", act)

    def _switch(self, phase: str, act: Callable[[Client], None]) -> None:
        """Call `act` on the leader while the engine's other ranks wait. Do nothing without a memory saver."""
        if self._settings.has_memory_saver:
            self._lead(phase, act)

    def _lead(self, phase: str, act: Callable[[Client], str | None]) -> str:
        """Call `act` on the leader while the engine's other ranks wait. Return its result on all of them."""
        return self._peers.broadcast(phase, (self._client and act(self._client)) or "")

    def shard_layout(self) -> ShardLayout:
        return self._side

    def start_update(self) -> list[str]:
        self._posted, self._num_loaded, self._checksums, self._differing = [], 0, [], []
        if self._client:
            self._client.post("starting an update", "/begin_weight_update")
        if self._has_weights:
            return []
        shards = self._side.rank_shards(self._settings.rank)
        blocks = self._side.quantised_shards(self._settings.rank) if self._settings.holds_blocks else {}
        wanted = parameters(shards, blocks, getattr(torch, self._settings.dtype))
        problems = self._request({"action": "check", "parameters": wanted, "padded": padded(shards)})
        self._has_weights = not problems and self.failure is None
        return problems

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        self._wait_until_loaded(index - NUM_BUFFERS)
        return self._buckets.allocate(index, num_bytes)

    def load(self, bucket: Bucket) -> None:
        if self._settings.verify:
            self._checksums += [entry for entry in bucket.entries if not entry.is_quantised]
        slot = bucket.index % NUM_BUFFERS
        buffer, description, handle = self._buckets.finish(slot)
        is_opened = self._opened.get(slot) is buffer
        self._opened[slot] = buffer
        request = (description if not is_opened else {}) | {
            "action": "fill",
            "slot": slot,
            "opens": not is_opened,
            "entries": bucket.entries,
            "used_bytes": bucket.values.nbytes,
            "dtype": str(bucket.dtype),
            "verify": self._settings.verify,
        }
        self._posted.append(self._post(request, torch.empty(0) if is_opened else handle))

    def end_update(self, version: int) -> list[str]:
        """Wait for all buckets and verify them. Return the tensors that differ, with their tensor-parallel rank."""
        self._wait_until_loaded(len(self._posted) - 1)
        problems = self._request({"action": "verify", "entries": self._checksums}, version=str(version))
        if self._client:
            self._client.post("ending an update", "/end_weight_update")
        if not problems and self.failure is None:
            self.version = version
        return problems

    def _wait_until_loaded(self, index: int) -> None:
        """Wait until the server has read the buckets of the sync up to `index`."""
        while self._num_loaded <= index:
            posted = self._posted[self._num_loaded]
            self._lead("loading a bucket", partial(self._await_bucket, posted))
            self._num_loaded += 1

    def _await_bucket(self, posted: Posted, client: Client) -> None:
        problems, has_failed = self._reports(client, "loading a bucket", posted)
        if has_failed:
            client.fail(f"loading a bucket: {'; '.join(problems)}")
        self._differing += problems

    def _request(self, request: dict[str, Any], version: str | None = None) -> list[str]:
        """Send a request to all processes of the server. Return their problems, identical on all ranks of the engine."""
        phase = f"at {request['action']}"
        posted = self._post(request, torch.empty(0), version)

        def await_problems(client: Client) -> str:
            problems, _ = self._reports(client, phase, posted)
            return json.dumps([] if client.failure else self._differing + problems)

        problems: list[str] = json.loads(self._lead(phase, await_problems))
        return problems

    def _post(self, request: dict[str, Any], handle: Tensor, version: str | None = None) -> Posted:
        """Send this rank's part of a request to the leader. The leader posts the parts of all ranks.

        With `version` the server flushes cached prefixes and reports this version with its later samples.
        """
        self._num_requests += 1
        number = self._num_requests
        request |= {"number": number, "tp_rank": self._settings.tp_rank}
        payloads = self._peers.gather("gathering a bucket", payload(json.dumps(request), handle))
        if self._client is None:
            return number, None
        body: dict[str, Any] = {"serialized_named_tensors": payloads, "load_format": self._settings.weight_loader}
        body |= {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": version}
        return number, self._client.begin_post("/update_weights_from_tensor", body)

    def _reports(self, client: Client, phase: str, posted: Posted) -> tuple[list[str], bool]:
        """Await a request. Return the problems that the server's processes reported, and True if a process failed."""
        number, response = posted
        client.await_response(phase, response)
        problems, has_failed = list[str](), False
        for tp_rank in range(self._settings.rollout.tp if client.failure is None else 0):
            report = json.loads(report_path(client.server.private_folder, number, tp_rank).read_text())
            assert report["number"] == number, "a report of another request"
            problems += [f"{problem} (tensor-parallel rank {tp_rank})" for problem in report["problems"]]
            has_failed = has_failed or report["has_failed"]
        return problems, has_failed


def parameters(shards: RankShards, blocks: Collection[str], dtype: torch.dtype) -> dict[str, tuple[Index, str]]:
    """Return shape and dtype of the server's parameters: one per shard, and scales for tensors stored as FP8 `blocks`.

    Local tensors "name[0]", "name[1]", ... are parts of one parameter, along a new first dim.
    """
    result: dict[str, tuple[Index, str]] = {}

    def add(name: str, shape: Index, dtype: torch.dtype) -> None:
        base, bracket, index = name.partition("[")
        if bracket:
            known = result[base][0][0] if base in result else 0
            shape = (max(int(index[:-1]) + 1, known), *shape)
        result[base] = shape, str(dtype)

    for name, tensor in shards.items():
        if name in blocks:
            add(name, tensor.shape, VALUES)
            add(scales_name(name), num_blocks(tensor.shape), SCALES)
        else:
            add(name, tensor.shape, torch.float32 if name.endswith(FLOAT32) else dtype)
    return result


def padded(shards: RankShards) -> list[str]:
    """Return the names of tensors with elements that no bucket fills."""
    return [name for name, t in shards.items() if sum(p.box.size for p in t.pieces) < math.prod(t.shape)]
