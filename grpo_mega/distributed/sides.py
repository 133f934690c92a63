"""The two sides of a job with ranks that only generate: trainer ranks, which are Megatron's world, and engine ranks after them.

Megatron takes its world from the default process group, so each side has a default group of its own. Another group holds all
ranks, for weight syncs and the exchange of samples, and one store serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

EVERYONE = "everyone"  # name and description of the group of both sides, which outlives an arrangement of Megatron's


@dataclass(frozen=True)
class Joined:
    rank: int  # in the whole job
    num_trainers: int
    store: dist.Store  # of the whole job
    everyone: dist.ProcessGroup

    @property
    def trains(self) -> bool:
        return self.rank < self.num_trainers


def join(backend: str, store: dist.Store, rank: int, world_size: int, num_engine_ranks: int, timeout: timedelta) -> Joined:
    """Join this rank to its side and to all, through the job's `store`."""
    num_trainers = world_size - num_engine_ranks
    trains = rank < num_trainers
    first, size = (0, num_trainers) if trains else (num_trainers, num_engine_ranks)
    side = dist.PrefixStore("trainers" if trains else "engines", store)
    dist.init_process_group(backend, store=side, rank=rank - first, world_size=size, timeout=timeout)
    # The public `new_group` makes groups within the default one only.
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
    # Ranks of the default group to ranks of this one: what `dist.get_rank(group)` looks up.
    distributed_c10d._world.pg_group_ranks[group] = {i: first + i for i in range(size)}
    return Joined(rank, num_trainers, dist.PrefixStore("job", store), group)
