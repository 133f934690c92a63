"""Process groups and this rank's place in the layout.

`start(config)` joins the ranks (torchrun's environment or our own launcher's), sets up Megatron's model-parallel groups and
seeds them; `Runtime` carries what the rest asks: ranks, groups, device. Nothing of Megatron's global state leaks further than
this package.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from grpo_mega import device as devices
from grpo_mega.config import Config
from grpo_mega.weights.layout import MegatronLayout


@dataclass(frozen=True)
class Runtime:
    device: devices.Device
    layout: MegatronLayout
    rank: int

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
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.layout.pp - 1

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return parallel_state.get_tensor_model_parallel_group()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over all ranks, in place."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values


def start(config: Config) -> Runtime:
    """Joins the ranks. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be set."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = devices.select(config.device, int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(device.backend, rank=rank, world_size=world_size, timeout=timedelta(minutes=10))
    layout = resolve_layout(config, world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
    )
    runtime = Runtime(device, layout, rank)
    _check_order(runtime)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed)
    return runtime


def resolve_layout(config: Config, world_size: int) -> MegatronLayout:
    """The layout with DP being what is left of the world."""
    wanted = config.layout
    return MegatronLayout(wanted.tp, wanted.pp, wanted.vpp or 1, world_size // (wanted.tp * wanted.pp))


def stop() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _check_order(runtime: Runtime) -> None:
    """The mapping of weights relies on `MegatronLayout.place`; it must be Megatron's own order of ranks."""
    theirs = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    assert theirs == runtime.layout.place(runtime.rank), (theirs, runtime.layout, runtime.rank)
