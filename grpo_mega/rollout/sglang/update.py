"""One sync of one engine: buckets go from the engine's ranks into its server, and are verified there.

Each rank describes the bucket that it has filled for its own device; the leader gathers these descriptions and posts them as
one request, and a bucket is filled again once its request was acknowledged. With two buffers one bucket is loaded while the
next is filled. After the last one the checksums that came with the buckets are compared with the server's parameters. FP8
blocks are compared with each bucket, before the server can process them; their differences are reported at the end, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.sglang.buckets import NUM_BUFFERS, DeviceBuckets, HostBuckets, payload
from grpo_mega.rollout.sglang.client import Client
from grpo_mega.rollout.sglang.settings import EngineSettings
from grpo_mega.weights.apply import Bucket, Entry
from grpo_mega.weights.boxes import Index, RankShards
from grpo_mega.weights.fp8_blocks import SCALES, VALUES
from grpo_mega.weights.receive import scales_name
from grpo_mega.weights.spec import num_blocks


class Update:
    def __init__(
        self,
        number: int,
        settings: EngineSettings,
        client: Client | None,  # the leader's; None on the other ranks
        rendezvous: Rendezvous,
        buckets: HostBuckets | DeviceBuckets,
    ) -> None:
        self._settings, self._client, self._rendezvous, self._buckets = settings, client, rendezvous, buckets
        self._key = f"update/{number}/{settings.engine}"
        self._num_requests = 0
        self._posted: list[tuple[int, Future[Any] | None]] = []  # by bucket: number of its request, and its response
        self._num_loaded = 0
        self._checksums: list[Entry] = []
        self._differing: list[str] = []  # on the leader: differences in FP8 blocks that the server reported so far

    def begin(self) -> None:
        if self._client is not None:
            self._client.post("beginning an update", "/begin_weight_update")

    def check(self, holding: RankShards, blocks: Collection[str]) -> list[str]:
        """Return how the server's parameters differ from `holding`; for a server that has no weights yet.

        `blocks`: the tensors that the server holds as FP8 blocks.
        """
        dtype = getattr(torch, self._settings.dtype)
        assert isinstance(dtype, torch.dtype)
        wanted = parameters(holding, blocks, dtype)
        return self._request({"action": "check", "parameters": wanted, "padded": padded(holding)}, version=None)

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        self._wait_until_loaded(index - NUM_BUFFERS)
        return self._buckets.allocate(index, num_bytes)

    def load(self, bucket: Bucket) -> None:
        if self._settings.prove:
            self._checksums += [entry for entry in bucket.entries if not entry.is_quantised]
        request = self._buckets.describe(bucket.index) | {
            "action": "fill",
            "entries": bucket.entries,
            "used_bytes": bucket.values.nbytes,
            "dtype": str(bucket.dtype),
            "prove": self._settings.prove,
        }
        number = self._num_requests
        self._posted.append((number, self._post(request, self._buckets.handle(bucket.index), version=None)))

    def end(self, version: int) -> list[str]:
        """Wait for all buckets and verify them; return the tensors that differ, with their tensor-parallel rank."""
        self._wait_until_loaded(len(self._posted) - 1)
        problems = self._request({"action": "prove", "entries": self._checksums}, version=str(version))
        if self._client is not None:
            self._client.post("ending an update", "/end_weight_update")
        return problems

    def _wait_until_loaded(self, index: int) -> None:
        """Return when the server has read bucket `index` and all before it."""
        while self._num_loaded <= index:
            key = f"{self._key}/loaded/{self._num_loaded}"
            if self._client is None:
                self._get_from_leader(key)
            else:
                number, response = self._posted[self._num_loaded]
                self._client.await_response("loading a bucket", response)
                if self._client.failure is None:
                    problems, has_failed = self._reports(number)
                    if has_failed:
                        self._client.fail(f"loading a bucket: {'; '.join(problems)}")
                    self._differing += problems
                self._set_for_ranks(key, "")
            self._num_loaded += 1

    def _request(self, request: dict[str, Any], version: str | None) -> list[str]:
        """Send a request to all processes of the server; return their problems, the same on every rank of the engine."""
        number = self._num_requests
        key = f"{self._key}/problems/{number}"
        response = self._post(request, torch.empty(0), version)
        if self._client is None:
            problems: list[str] = json.loads(self._get_from_leader(key))
            return problems
        self._client.await_response(f"at {request['action']}", response)
        problems = [] if self._client.failure else self._differing + self._reports(number)[0]
        self._differing = []
        self._set_for_ranks(key, json.dumps(problems))
        return problems

    def _post(self, request: dict[str, Any], handle: Tensor, version: str | None) -> Future[Any] | None:
        """Send this rank's part of a request to the leader; on the leader, post the parts of all ranks.

        With `version` the server reports that version with its samples from then on, and forgets cached prefixes.
        """
        number, rank = self._num_requests, self._settings.rank
        self._num_requests += 1
        request |= {"id": f"{self._key}/{number}", "report": str(self._report_path(number, self._settings.tp_rank))}
        payloads = [payload(json.dumps(request), handle)]
        if self._client is None:
            self._rendezvous.set(f"{self._key}/payload/{number}/{rank}", payloads[0])
            return None
        for other in range(rank + 1, rank + self._settings.rollout.tp):
            key = f"{self._key}/payload/{number}/{other}"
            payloads.append(self._rendezvous.get(key, f"rank {other}'s bucket", self._settings.leader_deadline_s))
            self._rendezvous.delete(key)
        body: dict[str, Any] = {"serialized_named_tensors": payloads, "load_format": self._settings.weight_loader}
        body |= {"flush_cache": False} if version is None else {"flush_cache": True, "weight_version": version}
        return self._client.begin_post("/update_weights_from_tensor", body)

    def _set_for_ranks(self, key: str, text: str) -> None:
        if self._settings.rollout.tp > 1:
            self._rendezvous.set(key, text)

    def _get_from_leader(self, key: str) -> str:
        return self._rendezvous.get(key, "the leader of its engine", self._settings.leader_deadline_s)

    def _reports(self, number: int) -> tuple[list[str], bool]:
        """Return the problems that the server's processes reported, and True if one could not do what was asked of it."""
        problems, has_failed = [], False
        for tp_rank in range(self._settings.rollout.tp):
            report = json.loads(self._report_path(number, tp_rank).read_text())
            assert report["id"] == f"{self._key}/{number}", "a report of another request"
            problems += [f"{problem} (tensor-parallel rank {tp_rank})" for problem in report["problems"]]
            has_failed = has_failed or report["has_failed"]
        return problems, has_failed

    def _report_path(self, number: int, tp_rank: int) -> Path:
        """A report is read before the request after the next is posted."""
        return self._settings.folder / f"loader_{tp_rank}_{number % (NUM_BUFFERS + 1)}.json"


def parameters(holding: RankShards, blocks: Collection[str], dtype: torch.dtype) -> dict[str, tuple[Index, str]]:
    """Return shape and dtype of the server's parameters: those of `holding`, and scales for tensors held as FP8 `blocks`.

    Local tensors "name[0]", "name[1]", ... are parts of one, along a new first dim.
    """
    result: dict[str, tuple[Index, str]] = {}

    def add(name: str, shape: Index, dtype: torch.dtype) -> None:
        base, bracket, index = name.partition("[")
        if bracket:
            known = result[base][0][0] if base in result else 0
            shape = (max(int(index[:-1]) + 1, known), *shape)
        result[base] = shape, str(dtype)

    for name, tensor in holding.items():
        if name in blocks:
            add(name, tensor.shape, VALUES)
            add(scales_name(name), num_blocks(tensor.shape), SCALES)
        else:
            add(name, tensor.shape, dtype)
    return result


def padded(holding: RankShards) -> list[str]:
    """Return the names of tensors with elements that no bucket fills."""
    return [name for name, t in holding.items() if sum(p.box.size for p in t.pieces) < math.prod(t.shape)]
