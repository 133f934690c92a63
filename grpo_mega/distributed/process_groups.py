"""The two sides of a job with ranks that only generate: first the trainer ranks, Megatron's world, then the engine ranks.

Megatron takes its world from the default process group, so each side has a separate default group. Another group has all ranks,
for weight syncs and the exchange of samples. One store serves all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

EVERYONE = "everyone"  # name and description of the group of both sides; it stays when Megatron's groups are destroyed


@dataclass(frozen=True)
class JobRanks:
    rank: int  # rank in the whole job
    num_trainers: int
    store: dist.Store  # the whole job's store
    everyone: dist.ProcessGroup

    @property
    def trains(self) -> bool:
        return self.rank < self.num_trainers


def join(backend: str, store: dist.Store, rank: int, world_size: int, num_engine_ranks: int, timeout: timedelta) -> JobRanks:
    """Join this rank to the group of its side and to the group of all ranks, by the job's `store`."""
    num_trainers = world_size - num_engine_ranks
    trains = rank < num_trainers
    first, size = (0, num_trainers) if trains else (num_trainers, num_engine_ranks)
    side = dist.PrefixStore("trainers" if trains else "engines", store)
    dist.init_process_group(backend, store=side, rank=rank - first, world_size=size, timeout=timeout)
    # The public `new_group` only creates groups within the default group.
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        backend,
        dist.PrefixStore(EVERYONE, store),
        group_name=EVERYONE,  # type: ignore[arg-type]  # a NewType of str
        timeout=timeout,
        group_desc=EVERYONE,
    )
    # `dist.get_rank(group)` looks up this map from ranks of the default group to ranks of this group.
    distributed_c10d._world.pg_group_ranks[group] = {i: first + i for i in range(size)}
    return JobRanks(rank, num_trainers, dist.PrefixStore("job", store), group)
