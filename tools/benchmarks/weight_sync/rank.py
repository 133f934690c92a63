"""One rank of a measured weight sync. `python rank.py FOLDER REPEAT` reads spec.pkl; rank 0 writes result.json.

The trainer's tensors have the shapes of its layout. Their contents depend only on tensor name and index, so replicas
agree. The sender is the trainer's own WeightSync, with verification. The receiver is not a server: `Engine` writes
buckets into plain tensors with the shapes of `engine_shards`, using `weights.receive.write_entries`. After every
round they are compared bit for bit with a direct load.
"""

from __future__ import annotations

import json
import math
import pickle
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from grpo_mega.rollout.engine import Engine as AnyEngine
from grpo_mega.rollout.sglang.loader import NUM_BUFFERS
from grpo_mega.trainer.colocation import WeightSync
from grpo_mega.weights.apply import Bucket, Entry, load_shards, mismatched_tensors, write_entries
from grpo_mega.weights.boxes import Box, Index, RankShards
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import MegatronLayout, ShardLayout, engine_shards, megatron_shards
from grpo_mega.weights.plan import plan_transfers

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `python rank.py FOLDER REPEAT`

from tools.benchmarks import harness
from tools.benchmarks.weight_sync.dry import Spec

DTYPE = torch.bfloat16
ROWS_AT_ONCE = 1 << 22  # elements to make at a time
MAX_NAMED = 4
Tensors = dict[str, Tensor]


class Engine:
    """The receiver of an engine rank: plain tensors, and as many buffers in turn as a server has."""

    def __init__(self, holding: RankShards) -> None:
        self.tensors, self.verifies = blank(holding), True
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS
        self._entries: list[Entry] = []

    def start_update(self) -> list[str]:
        self._entries = []
        return []

    def allocate(self, index: int, num_bytes: int) -> Tensor:
        if self._buffers[index % NUM_BUFFERS].numel() < num_bytes:
            self._buffers[index % NUM_BUFFERS] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffers[index % NUM_BUFFERS][:num_bytes]

    def load(self, bucket: Bucket) -> None:
        write_entries(bucket.entries, bucket.values, self.tensors, bucket.dtype)
        self._entries += bucket.entries

    def end_update(self, version: int) -> list[str]:
        return mismatched_tensors(self._entries, self.tensors) if self.verifies else []


class FullGather:
    """The transport of a full gather: the ranks of each copy of the model exchange all weights.

    It is a lower bound for trainers that gather all weights before they take an engine's slices: each rank has packed
    its shard in advance, nothing is placed in tensors, and only one rank sends weights that several ranks hold.
    """

    def __init__(self, trainer: ShardLayout, layout: MegatronLayout, weights: Tensors, bucket_bytes: int) -> None:
        """Make the process groups. Collective."""
        copies: dict[int, list[int]] = defaultdict(list)
        for rank in range(layout.world_size):
            copies[layout.place(rank)[2] // layout.ep].append(rank)
        me = dist.get_rank()
        own = layout.place(me)[2] // layout.ep
        self._group = [dist.new_group(ranks) for ranks in copies.values()][list(copies).index(own)]
        holders: dict[tuple[Box, ...], dict[int, str]] = defaultdict(dict)  # names by rank, of equal weights
        for rank in copies[own]:
            for name, local in trainer.rank_shards(rank).items():
                holders[tuple(piece.box for piece in local.pieces)][rank] = name
        num_elements, shard = dict.fromkeys(copies[own], 0), [torch.empty(0, dtype=DTYPE)]
        for boxes, names in holders.items():
            sender = min(names, key=num_elements.__getitem__)
            num_elements[sender] += sum(box.size for box in boxes)
            shard += [weights[names[me]].flatten()] if sender == me else []
        size = torch.tensor(sum(map(len, shard)))
        dist.all_reduce(size, op=dist.ReduceOp.MAX)
        self._shard = pad(torch.cat(shard), (0, int(size) - sum(map(len, shard))))
        self._num_ranks = len(copies[own])
        self._part_size = max(1, bucket_bytes // DTYPE.itemsize // self._num_ranks)
        self._buffer = torch.empty(self._part_size * self._num_ranks, dtype=DTYPE)

    def run(self) -> int:
        """Exchange the weights. Return the bytes that this rank received from other ranks."""
        for part in self._shard.split(self._part_size):
            buffer = self._buffer[: len(part) * self._num_ranks]
            dist.all_gather_single(buffer.view(torch.uint8), part.view(torch.uint8), group=self._group)
        return self._shard.nbytes * (self._num_ranks - 1)


class Bench:
    """Both paths of one rank, with their state between runs. The default process group has the trainer's ranks."""

    def __init__(self, spec: Spec) -> None:
        family, world_size, rank = family_of(spec.shape.model_type), dist.get_world_size(), dist.get_rank()
        self._shapes = family.hf_tensors(spec.shape)
        trainer = megatron_shards(family, spec.shape, spec.source)
        engines = engine_shards(family, spec.shape, spec.target, world_size)
        plan = plan_transfers(trainer, engines, ranks_per_node=spec.ranks_per_node)
        self.wanted = engines.rank_shards(rank)
        self.weights = blank(trainer.rank_shards(rank))
        load_shards(trainer.rank_shards(rank), self.weights, self.read)
        self.engine = Engine(self.wanted)
        self._syncs = [WeightSync(plan, DTYPE, spec.bucket_bytes, meet, verify=verify) for verify in (False, True)]
        self.gather = FullGather(trainer, spec.source, self.weights, spec.bucket_bytes)

    def read(self, box: Box) -> Tensor:
        """Return the contents of a slice of a Hugging Face tensor: pseudorandom numbers below 2."""
        return values_of(box, self._shapes[box.tensor])

    def sync(self, *, verify: bool = True) -> int:
        self.engine.verifies = verify
        return self._syncs[verify].sync_weights(self.weights, cast(AnyEngine, self.engine), version=1)

    def unlike_a_direct_fill(self) -> list[str]:
        """Return the tensors that differ from a direct load. Compare one at a time to save memory."""
        found = []
        for name, local in self.wanted.items():
            expected = {name: torch.zeros(local.shape, dtype=DTYPE)}
            load_shards({name: local}, expected, self.read)
            bits, found_bits = (one[name].view(torch.int16) for one in (expected, self.engine.tensors))
            if not torch.equal(bits, found_bits):
                found.append(name)
        return found


def main(arguments: list[str] | None = None) -> int:
    folder, repeat = Path(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher prints the message
    spec: Spec = pickle.loads((folder / "spec.pkl").read_bytes())
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    found = measure(spec, repeat)
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def measure(spec: Spec, repeat: int) -> dict[str, Any]:
    """Run each path once to warm up, then `repeat` times in turn. All ranks return the same; bytes are sums."""
    bench, problems = Bench(spec), list[str]()

    def sync(verify: bool) -> harness.Figures:
        for tensor in bench.engine.tensors.values():
            tensor.zero_()  # so that no run passes with the results of an earlier one
        return timed(partial(bench.sync, verify=verify))

    def check() -> None:
        problems.extend(f"{name} differs from a direct fill" for name in bench.unlike_a_direct_fill())

    paths = {
        "sync": partial(sync, True),
        "unproven": partial(sync, False),
        "full_gather": partial(timed, bench.gather.run),
    }
    rounds = harness.take_turns(paths, repeat, warm_up=1, after_round=check)
    named = [f"rank {rank}: {one}" for rank, found in enumerate(meet("", problems)) for one in found[:MAX_NAMED]]
    return {"rounds": rounds, "problems": named}


def timed(act: Callable[[], int]) -> harness.Figures:
    """Return the seconds of the slowest rank, and the sums over ranks of CPU seconds and received bytes."""
    received: list[int] = []
    dist.barrier()
    found = harness.timed(lambda: received.append(act()))()
    slowest = torch.tensor(found["seconds"], dtype=torch.float64)
    total = torch.tensor([found["cpu_seconds"], received[0]], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return {"seconds": float(slowest), "cpu_seconds": float(total[0]), "bytes": float(total[1])}


def meet(phase: str, problems: list[str]) -> list[list[str]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problems)
    return found


def blank(holding: RankShards) -> Tensors:
    return {name: torch.zeros(local.shape, dtype=DTYPE) for name, local in holding.items()}


def values_of(box: Box, shape: Index) -> Tensor:
    found = torch.empty(box.shape, dtype=DTYPE)
    step = max(1, ROWS_AT_ONCE // math.prod(box.shape[1:]))
    for row in range(box.start[0], box.stop[0], step):
        stop = min(row + step, box.stop[0])
        index = torch.zeros((), dtype=torch.int64)
        for first, last, size in zip((row, *box.start[1:]), (stop, *box.stop[1:]), shape, strict=True):
            index = index[..., None] * size + torch.arange(first, last)
        bits = (index + zlib.crc32(box.tensor.encode())).mul_(0x9E3779B97F4A7C15 - (1 << 64))
        bits = (bits >> 40).bitwise_and_(0xBFFF).to(torch.int16)  # clear the exponent's highest bit
        found[row - box.start[0] : stop - box.start[0]] = bits.view(DTYPE)
    return found


if __name__ == "__main__":
    harness.start(main)
