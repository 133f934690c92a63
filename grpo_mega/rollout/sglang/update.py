"""How the buckets of a sync get from the ranks of an engine into its server.

Each rank describes the bucket that it has filled for its own device; the leader gathers these descriptions and posts them as
one request, and a bucket is filled again once its request was acknowledged. With two buffers one bucket is loaded while the
next is filled. After the last one the checksums that came with the buckets are compared with what the server holds; those of
FP8 blocks were compared with each bucket, before anything could be made of them, and what then differed is told here too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_mega.distributed.rendezvous import Rendezvous
from grpo_mega.rollout.sglang.buckets import NUM_BUFFERS, DeviceBuckets, HostBuckets, payload
from grpo_mega.rollout.sglang.link import ServerLink
from grpo_mega.weights.apply import Bucket, Entry
from grpo_mega.weights.boxes import Index, RankShards
from grpo_mega.weights.fp8_blocks import SCALES, VALUES
from grpo_mega.weights.receive import scales_name
from grpo_mega.weights.spec import num_blocks

LOADER = "grpo_mega.rollout.sglang.loader.load"


@dataclass(frozen=True)
class Place:
    """A rank's place in its engine."""

    engine: int
    tp_rank: int
    tp: int
    rank: int

    @property
    def is_leader(self) -> bool:
        return self.tp_rank == 0

    @property
    def leader(self) -> int:
        return self.rank - self.tp_rank

    @property
    def peers(self) -> range:
        """The ranks that the leader serves besides itself."""
        return range(self.rank + 1, self.rank + self.tp) if self.is_leader else range(0)


class Update:
    """One sync of one engine. `link` is the leader's; None on the other ranks."""

    def __init__(
        self,
        number: int,
        place: Place,
        link: ServerLink | None,
        rendezvous: Rendezvous,
        buckets: HostBuckets | DeviceBuckets,
        folder: Path,
        deadline_s: float,
        *,
        prove: bool,
    ) -> None:
        self._prove = prove
        self._place, self._link, self._rendezvous, self._buckets = place, link, rendezvous, buckets
        self._folder, self._deadline_s = folder, deadline_s
        self._key = f"update/{number}/{place.engine}"
        self._requests = 0
        self._posted: list[tuple[int, Future[Any] | None]] = []  # by bucket: number of its request, and its answer
        self._num_settled = 0
        self._proof: list[Entry] = []
        self._differing: list[str] = []  # at the leader: what the server found as it took buckets over

    def begin(self) -> None:
        if self._link is not None:
            self._link.attempt("beginning an update", lambda api: api.begin_update())

    def check(self, holding: RankShards, blocks: Collection[str], dtype: torch.dtype) -> list[str]:
        """What differs between the server's parameters and the table; for a server that has no weights yet.

        `blocks`: the tensors that the server keeps as FP8 blocks, and not as `dtype`.
        """
        wanted = parameters(holding, blocks, dtype)
        return self._request({"action": "check", "parameters": wanted, "padded": padded(holding)}, version=None)

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        self._free(index - NUM_BUFFERS)
        return self._buckets.allocate(index, num_bytes)

    def load(self, bucket: Bucket) -> None:
        if self._prove:
            self._proof += [entry for entry in bucket.entries if not entry.is_quantised]
        request = self._buckets.describe(bucket.index) | {
            "action": "fill",
            "entries": bucket.entries,
            "used_bytes": bucket.values.nbytes,
            "dtype": str(bucket.dtype),
            "prove": self._prove,
        }
        number = self._requests
        self._posted.append((number, self._post(request, self._buckets.handle(bucket.index), version=None)))

    def end(self, version: int) -> list[str]:
        """Closes the update; the problems found, as (tensor-parallel rank, tensor)."""
        self._free(len(self._posted) - 1)
        problems = self._request({"action": "prove", "entries": self._proof}, version=str(version))
        if self._link is not None:
            self._link.attempt("ending an update", lambda api: api.end_update())
        return problems

    def _free(self, index: int) -> None:
        """Returns when the server has read bucket `index` and all before it."""
        while self._num_settled <= index:
            if self._link is not None:
                number, answer = self._posted[self._num_settled]
                self._link.settle("loading a bucket", answer)
                if self._link.failure is None:
                    problems, has_failed = self._reports(number)
                    if has_failed:
                        self._link.fail(f"loading a bucket: {'; '.join(problems)}")
                    self._differing += problems
                self._tell(f"loaded/{self._num_settled}", "")
            else:
                self._rendezvous.get(f"{self._key}/loaded/{self._num_settled}", "the leader of its engine", self._deadline_s)
            self._num_settled += 1

    def _request(self, request: dict[str, Any], version: str | None) -> list[str]:
        """Asks all processes of the server; their problems, the same on every rank of the engine."""
        number = self._requests
        future = self._post(request, torch.empty(0), version)
        if self._link is None:
            return json.loads(
                self._rendezvous.get(f"{self._key}/problems/{number}", "the leader of its engine", self._deadline_s)
            )
        self._link.settle(f"at {request['action']}", future)
        problems = [] if self._link.failure else self._differing + self._reports(number)[0]
        self._differing = []
        self._tell(f"problems/{number}", json.dumps(problems))
        return problems

    def _post(self, request: dict[str, Any], handle: Tensor, version: str | None) -> Future[Any] | None:
        """Sends this rank's part to the leader, or as the leader posts all parts."""
        number, place = self._requests, self._place
        self._requests += 1
        request |= {"id": f"{self._key}/{number}", "report": str(self._report_path(number, place.tp_rank))}
        mine = payload(json.dumps(request), handle)
        if self._link is None:
            self._rendezvous.set(f"{self._key}/payload/{number}/{place.rank}", mine)
            return None
        payloads = [mine]
        for rank in place.peers:
            key = f"{self._key}/payload/{number}/{rank}"
            payloads.append(self._rendezvous.get(key, f"rank {rank}'s bucket", self._deadline_s))
            self._rendezvous.delete(key)
        flush = version is not None
        return self._link.submit(lambda api: api.load(payloads, LOADER, version, flush))

    def _reports(self, number: int) -> tuple[list[str], bool]:
        """What the server's processes found, and whether one of them could not do what was asked of it."""
        found, has_failed = [], False
        for tp_rank in range(self._place.tp):
            report = json.loads(self._report_path(number, tp_rank).read_text())
            assert report["id"] == f"{self._key}/{number}", "a report of another request"
            found += [f"{problem} (tensor-parallel rank {tp_rank})" for problem in report["problems"]]
            has_failed = has_failed or report["has_failed"]
        return found, has_failed

    def _report_path(self, number: int, tp_rank: int) -> Path:
        """A report is read before the request after the next is posted."""
        return self._folder / f"loader_{tp_rank}_{number % (NUM_BUFFERS + 1)}.json"

    def _tell(self, key: str, text: str) -> None:
        if self._place.peers:
            self._rendezvous.set(f"{self._key}/{key}", text)


def parameters(holding: RankShards, blocks: Collection[str], dtype: torch.dtype) -> dict[str, tuple[Index, str]]:
    """Shape and dtype of the server's parameters: those of the table, and the scales of what it keeps as FP8 `blocks`.

    Local tensors "name[0]", "name[1]", ... are parts of one, along a new first dim.
    """
    found: dict[str, tuple[Index, str]] = {}

    def add(name: str, shape: Index, dtype: torch.dtype) -> None:
        base, bracket, index = name.partition("[")
        if bracket:
            known = found[base][0][0] if base in found else 0
            shape = (max(int(index[:-1]) + 1, known), *shape)
        found[base] = shape, str(dtype)

    for name, tensor in holding.items():
        if name in blocks:
            add(name, tensor.shape, VALUES)
            add(scales_name(name), num_blocks(tensor.shape), SCALES)
        else:
            add(name, tensor.shape, dtype)
    return found


def padded(holding: RankShards) -> list[str]:
    """The tensors with elements that no bucket fills."""
    return [name for name, t in holding.items() if sum(p.box.size for p in t.pieces) < math.prod(t.shape)]
