"""An SGLang server as the engine of `rollout.tp` neighbouring ranks, on their own devices.

The first of these ranks, the leader, starts the server, calls it and stops it; the others give their memory and their buckets
of a sync. A failure of the server is noted in `failure` and never raised inside a collective of other ranks; they learn of it
at the next rendezvous. The job's store is asked for the next prompt only: these ranks have a group of their own (Peers).

In a sync each rank describes the bucket that it has filled for its own device; the leader gathers these descriptions and posts
them as one request, and a bucket is filled again once its request was acknowledged. With two buffers one bucket is loaded while
the next is filled. After the last one the checksums that came with the buckets are compared with the server's parameters. FP8
blocks are compared with each bucket, before the server can process them; their differences are reported at the end, too.
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

from grpo_mega.distributed.peers import Peers
from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.errors import EngineError
from grpo_mega.rollout.engine import NONE_BEGUN, Engine, OnSample, Sampling
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
Posted = tuple[int, Future[Any] | None]  # the number of a request and, on the leader, its response


class SGLangEngine(Engine):
    is_server = True

    def __init__(
        self, settings: EngineSettings, side: ShardLayout, rendezvous: Rendezvous, buckets: HostBuckets | DeviceBuckets
    ) -> None:
        """Begin to start the server, where this rank leads; `wait_until_ready` finishes that."""
        self._settings, self._side, self._rendezvous, self._buckets = settings, side, rendezvous, buckets
        self._peers = Peers(rendezvous, settings.tp_rank, settings.rollout.tp, settings.leader_deadline_s)
        self._has_weights = False
        self._num_phases = self._num_requests = 0
        self._opened: dict[int, object] = {}  # by slot, the buffer that the server has opened
        # Of the sync under way:
        self._posted: list[Posted] = []  # by bucket
        self._num_loaded = 0
        self._checksums: list[Entry] = []
        self._differing: list[str] = []  # on the leader: differences in FP8 blocks that the server reported so far
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
        begun: Mapping[int, Group] = NONE_BEGUN,
    ) -> dict[int, Group]:
        """Take no more groups at once than an equal share of all, so that the first engine does not take everything."""
        self._check_lengths(prompts, sampling)
        self._num_phases += 1
        if self._client is None:
            return {}
        counter = f"prompts/{self._num_phases}"
        if self._settings.rank == 0:  # no rank asks for prompts of the phase before
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
            begun=begun,
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
        """Let the server sleep as soon as it is idle; asked before that it would end itself.

        With overlapped scheduling it works for about one decode step more after the last sample.
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
        """Let the leader `act`, while the other ranks of the engine wait; do nothing without a memory saver."""
        if self._settings.has_memory_saver:
            self._lead(phase, act)

    def _lead(self, phase: str, act: Callable[[Client], str | None]) -> str:
        """Return the result of `act`, for which the other ranks of the engine wait while the leader does it."""
        return self._peers.broadcast(phase, (self._client and act(self._client)) or "")

    def shard_layout(self) -> ShardLayout:
        return self._side

    def begin_update(self) -> list[str]:
        self._posted, self._num_loaded, self._checksums, self._differing = [], 0, [], []
        if self._client:
            self._client.post("beginning an update", "/begin_weight_update")
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
        if self._settings.prove:
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
            "prove": self._settings.prove,
        }
        self._posted.append(self._post(request, torch.empty(0) if is_opened else handle))

    def end_update(self, version: int) -> list[str]:
        """Wait for all buckets and verify them; return the tensors that differ, with their tensor-parallel rank."""
        self._wait_until_loaded(len(self._posted) - 1)
        problems = self._request({"action": "prove", "entries": self._checksums}, version=str(version))
        if self._client:
            self._client.post("ending an update", "/end_weight_update")
        if not problems and self.failure is None:
            self.version = version
        return problems

    def _wait_until_loaded(self, index: int) -> None:
        """Return when the server has read bucket `index` of the sync and all before it."""
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
        """Send a request to all processes of the server; return their problems, the same on every rank of the engine."""
        phase = f"at {request['action']}"
        posted = self._post(request, torch.empty(0), version)

        def await_problems(client: Client) -> str:
            problems, _ = self._reports(client, phase, posted)
            return json.dumps([] if client.failure else self._differing + problems)

        problems: list[str] = json.loads(self._lead(phase, await_problems))
        return problems

    def _post(self, request: dict[str, Any], handle: Tensor, version: str | None = None) -> Posted:
        """Send this rank's part of a request to the leader; on the leader, post the parts of all ranks.

        With `version` the server reports that version with its samples from then on, and forgets cached prefixes.
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
        """Await a request; return the problems that the server's processes reported, and True if one could not do it."""
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
    """Return shape and dtype of the server's parameters: those of `shards`, and scales for tensors held as FP8 `blocks`.

    Local tensors "name[0]", "name[1]", ... are parts of one, along a new first dim.
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
