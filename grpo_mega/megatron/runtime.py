"""Process groups and this rank's place in the layout.

`start(config)` joins the ranks from the environment of torchrun or of our launcher, creates Megatron's model-parallel
groups and seeds them. `arrange` can set up another layout in the same processes. `Runtime` holds ranks, groups and
device. No other package sees Megatron's global state. Ranks that only generate (layout.engine_ranks) come after the
layout's ranks, and Megatron does not know them.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from grpo_mega.config import Config
from grpo_mega.distributed import device as devices
from grpo_mega.distributed.messages import shared_key
from grpo_mega.distributed.rendezvous import EVERYONE, Rendezvous, job_store, join_sides
from grpo_mega.errors import UserError
from grpo_mega.megatron.loaded_kernels import check_kernels as check_kernels
from grpo_mega.megatron.precision import forget_fp8_state
from grpo_mega.weights.layout import MegatronLayout, megatron_layout

Meet = Callable[[Rendezvous], None]


@dataclass(frozen=True)
class Runtime:
    device: devices.Device
    layout: MegatronLayout
    rank: int
    store: dist.Store  # shared by all ranks; its keys belong to this arrangement only
    num_engine_ranks: int = 0  # ranks that only generate, after the layout's ranks; 0: every rank trains and generates
    everyone: dist.ProcessGroup | None = None  # the group of all ranks; None: the default group

    @property
    def num_ranks(self) -> int:
        return self.layout.world_size + self.num_engine_ranks

    @property
    def trains(self) -> bool:
        """Return True on a rank of the layout."""
        return self.rank < self.layout.world_size

    @property
    def generates(self) -> bool:
        return not (self.num_engine_ranks and self.trains)

    @property
    def first_engine_rank(self) -> int:
        return self.layout.world_size if self.num_engine_ranks else 0

    @property
    def tp_rank(self) -> int:
        return self.layout.place(self.rank)[0]

    @property
    def pp_rank(self) -> int:
        return self.layout.place(self.rank)[1]

    @property
    def dp_rank(self) -> int:
        return self.layout.place(self.rank)[2]

    @property
    def cp_rank(self) -> int:
        return self.layout.cp_rank(self.rank)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """Return the tensor-parallel group; None if this rank has whole tensors."""
        return parallel_state.get_tensor_model_parallel_group() if self.layout.tp > 1 else None

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """Return the group of ranks that share a sequence; None if this rank has whole sequences."""
        return parallel_state.get_context_parallel_group() if self.layout.cp > 1 else None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place."""
        dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Take the maximum over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    @contextmanager
    def raise_on_all_ranks(self, ranks: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Raise on all `ranks` the first UserError that any of them raises inside. None: the default group.

        All ranks then end with the same line instead of waiting for a rank that is gone. Call no collectives inside.
        """
        error: UserError | None = None
        try:
            yield
        except UserError as caught:
            error = caught
        errors: list[UserError | None] = [None] * dist.get_world_size(ranks)
        dist.all_gather_object(errors, error, group=ranks)
        for found in errors:
            if found is not None:
                raise found from None


def start(config: Config, meet: Meet | None = None) -> Runtime:
    """Join the ranks and arrange them. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be set.

    Every rank calls `meet` with the rendezvous of all ranks before it joins a process group.
    """
    if not config.layout.engine_ranks:
        return arrange(config, join(config, meet))
    device = _select_device(config)
    with _joining(config, meet) as (store, rank, world_size):
        num_trainers = world_size - config.layout.engine_ranks
        everyone = join_sides(
            device.backend, store, rank, world_size, num_trainers, timedelta(seconds=config.collective_timeout_s)
        )
    store = dist.PrefixStore("job", store)
    if rank < num_trainers:
        runtime = arrange(config, device)
    else:
        runtime = Runtime(device, megatron_layout(config.layout, num_trainers), rank, store)
    return replace(runtime, store=store, num_engine_ranks=config.layout.engine_ranks, everyone=everyone)


def join(config: Config, meet: Meet | None = None) -> devices.Device:
    """Join the ranks into one process group. Return this rank's device."""
    device = _select_device(config)
    with _joining(config, meet) as (store, rank, world_size):
        dist.init_process_group(
            device.backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=config.collective_timeout_s),
        )
    return device


def arrange(config: Config, device: devices.Device) -> Runtime:
    """Create Megatron's groups and random states for the config's layout. Destroy earlier groups."""
    check_kernels(config, device)  # `join` has checked only the first config of a process
    _leave_groups()
    rank = dist.get_rank()
    layout = megatron_layout(config.layout, dist.get_world_size())
    # A prefix of the job's store that no earlier arrangement used. Every rank counts its own arrangements.
    store = dist.distributed_c10d._get_default_store()
    runtime = Runtime(
        device, layout, rank, dist.PrefixStore(f"arrangement/{store.add(f'arrangements/{rank}', 1)}", store)
    )
    # In the other order Megatron accepts this size only. The rules of layouts require it unless the model is dense.
    expert_tp = layout.etp if layout.order == "tp-dp-pp" or layout.pp == 1 else layout.tp // layout.ep
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=expert_tp,
        order={"tp-dp-pp": "tp-cp-ep-dp-pp", "tp-pp-dp": "tp-cp-ep-pp-dp"}[layout.order],
    )
    # The mapping of weights relies on the order of ranks in `MegatronLayout.place`.
    theirs = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    ours = *layout.place(rank), runtime.cp_rank
    assert theirs == ours, (theirs, ours, layout)
    of_experts = (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )
    placed = layout.ep_rank(rank), layout.etp_rank(rank)
    assert expert_tp != layout.etp or of_experts == placed, (of_experts, placed, layout)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    return runtime


def stop() -> None:
    _leave_groups()
    dist.destroy_process_group()


def _select_device(config: Config) -> devices.Device:
    device = devices.select(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    check_kernels(config, device)
    return device


@contextmanager
def _joining(config: Config, meet: Meet | None) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the job's store, this process's rank and the number of ranks. Inside, all ranks have the same key."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = job_store(rank, timedelta(seconds=config.collective_timeout_s))
    with shared_key(store, rank, world_size, config.run_dir):
        if meet is not None:
            meet(Rendezvous(store, rank, world_size, scope="start"))
        yield store, rank, world_size


def _leave_groups() -> None:
    """Destroy Megatron's groups with their threads and connections. Megatron itself only forgets them.

    The garbage collector runs first, because an unused policy has reference cycles and holds its groups.
    """
    parallel_state.destroy_model_parallel()
    forget_fp8_state()
    gc.collect()
    for group in [
        g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD and g.group_desc != EVERYONE
    ]:
        dist.destroy_process_group(group)
