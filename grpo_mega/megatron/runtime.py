"""Start Megatron on this rank: process groups, the rank's place in the layout, and the kernels that loaded.

`start(config)` joins the ranks from the environment of torchrun or of our launcher, creates Megatron's model-parallel
groups and seeds them. `arrange` can set up another layout in the same processes. `Runtime` holds ranks, groups and
device. No other package sees Megatron's global state. Ranks that only generate (layout.engine_ranks) come after the
layout's ranks, and Megatron does not know them.

An installed package may fail to load. If an import of Transformer Engine fails for lack of a module, Megatron continues
without it and silently ignores FP8. So the kernels that Megatron loaded are checked.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from grpo_mega.config import Config
from grpo_mega.distributed import device as devices
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.messages import shared_key
from grpo_mega.distributed.rendezvous import EVERYONE, job_store, join_sides
from grpo_mega.errors import ConfigError, UserError, raise_all
from grpo_mega.megatron.precision import forget_fp8_state
from grpo_mega.preflight.layout import context_problems, megatron_layout
from grpo_mega.preflight.machine import Kernels, choose_kernels, flash_attention_version, transformer_engine_version
from grpo_mega.preflight.precision import card_problems, kernel_problems
from grpo_mega.weights.layout import MegatronLayout
from grpo_mega.weights.spec import ModelShape

CHECKED_LENGTHS = (1, 5, 63, 129, 200)  # tokens of the samples that check_attention packs
ALLOWED_ERROR = 0.02  # relative to a tensor's norm; rounding to bf16 gives 0.003


def in_use(device: Device) -> Kernels:
    """Return the kernels that a run on `device` uses."""
    if not device.is_cuda:
        return choose_kernels(is_cuda=False)
    problem = check_loads()
    from megatron.core import optimizer
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers

    return choose_kernels(
        is_cuda=True,
        transformer_engine=gpt_layer_specs.HAVE_TE,
        apex_adam=optimizer.Adam.__module__.startswith("apex."),
        apex_weight_gradients=layers._grad_accum_fusion_available,
        problem=problem,
    )


def check_kernels(config: Config, device: Device) -> None:
    """Raise ConfigError if the run needs a kernel that did not load or that this device lacks."""
    raise_all(card_problems(config.precision, device.capability, device.name))
    kernels_in_use, version = in_use(device), transformer_engine_version()
    if not kernels_in_use.transformer_engine:
        needs = {"precision.fp8": config.precision.fp8, "optimizer.moments_dtype": config.optimizer.moments_dtype}
        reason = kernels_in_use.why if device.is_cuda else "this run is on a CPU"
        for key, value in needs.items():
            if value not in (None, "float32"):
                raise ConfigError(f"{key}={value}: needs Transformer Engine on a GPU, and {reason}; leave {key} out")
        return
    raise_all(context_problems(config))
    raise_all(kernel_problems(config, device.capability, device.name, version, flash_attention_version()))


def check_attention(shape: ModelShape, dtype: torch.dtype, device: Device) -> None:
    """Raise ConfigError if Transformer Engine's attention is wrong for packed samples of this model on this card.

    With some versions of cuDNN the output is right and the gradients are wrong, without an error: 9.14 on an H100 for
    heads of 256.
    """
    if isinstance(torch.empty(0), FakeTensor):  # a rehearsal computes nothing
        return
    group = shape.num_heads // shape.num_kv_heads
    for window in sorted({0, *shape.windows} - {1}):  # alone, a token's query and key have no gradient
        errors = attention_errors(group, shape.head_dim, shape.v_dim or shape.head_dim, window, dtype, device)
        if wrong := {name: error for name, error in errors.items() if not error <= ALLOWED_ERROR}:
            from transformer_engine_torch import get_cudnn_version

            major, rest = divmod(get_cudnn_version(), 10_000)
            figures = ", ".join(f"{name} by {error:.0%}" for name, error in wrong.items())
            raise ConfigError(
                f"Transformer Engine's attention with cuDNN {major}.{rest // 100}.{rest % 100} is wrong on this card"
                f" for heads of {shape.head_dim} ({figures}); install a newer cuDNN and remove an older one from"
                " LD_LIBRARY_PATH, or set NVTE_FUSED_ATTN=0, which needs more memory"
            )


@functools.cache
def attention_errors(
    group: int, size: int, value_size: int, window: int, dtype: torch.dtype, device: Device
) -> dict[str, float]:
    """Return the relative errors of Transformer Engine's attention and of its gradients, against torch in float32.

    There are two key heads of `size` elements, with `group` query heads each. `window` is a sliding window; 0: none.
    """
    from transformer_engine.pytorch import DotProductAttention

    where = device.torch_device
    if device.is_cuda:
        # A kernel may read its workspace before it writes it. The allocator returns this memory as workspace.
        torch.full((1 << 26,), torch.nan, device=where)
    generator = torch.Generator(where).manual_seed(0)
    heads = ((2 * group, size), (2, size), (2, value_size), (2 * group, value_size))
    q, k, v, upstream = (
        torch.randn(sum(CHECKED_LENGTHS), *shape, generator=generator, device=where).to(dtype) for shape in heads
    )
    cuts = torch.tensor([0, *CHECKED_LENGTHS], device=where).cumsum(0).int()
    attend = DotProductAttention(
        2 * group,
        (size, value_size),
        num_gqa_groups=2,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        window_size=(window - 1 if window else -1, 0),
    )
    longest = max(CHECKED_LENGTHS)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs, cu_seqlens_q=cuts, cu_seqlens_kv=cuts, max_seqlen_q=longest, max_seqlen_kv=longest)
    out.backward(upstream.flatten(1))
    exact = [x.float().requires_grad_() for x in (q, k, v)]
    samples = [[x[start:end] for x in exact] for start, end in pairwise(cuts.tolist())]
    expected = torch.cat([_attend(q, k, v, window) for q, k, v in samples])
    expected.backward(upstream.float())
    pairs: dict[str, tuple[Any, Any]] = {"output": (out.view_as(upstream), expected)}
    pairs |= {f"gradient of {n}": (x.grad, y.grad) for n, x, y in zip("qkv", inputs, exact, strict=True)}
    return {name: float((found - right).norm() / right.norm()) for name, (found, right) in pairs.items()}


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Return the causal attention of one sample [tokens, heads, size]."""
    sees = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    if window:
        sees = sees.triu(1 - window)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(query, key, value, sees, enable_gqa=True)[0].transpose(0, 1)


@functools.cache
def check_loads() -> str:
    """Return why an installed Transformer Engine does not load; "" if it loads or is not installed.

    Call it before importing megatron.core. Raise ConfigError for an error that would break that import.
    """
    if find_spec("transformer_engine") is None:
        return ""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ModuleNotFoundError as error:  # all of Megatron's modules catch this error, and no other
        return _one_line(error)
    except Exception as error:
        raise ConfigError(
            f"the installed Transformer Engine {transformer_engine_version() or '(no version)'} does not load "
            f"({_one_line(error)}); run pip install --no-build-isolation 'transformer-engine[pytorch]' after torch, "
            "or pip uninstall it"
        ) from None
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


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


def start(config: Config) -> Runtime:
    """Join the ranks and arrange them. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be set."""
    if not config.layout.engine_ranks:
        return arrange(config, join(config))
    device = _select_device(config)
    with _joining(config) as (store, rank, world_size):
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


def join(config: Config) -> devices.Device:
    """Join the ranks into one process group. Return this rank's device."""
    device = _select_device(config)
    with _joining(config) as (store, rank, world_size):
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
def _joining(config: Config) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the job's store, this process's rank and the number of ranks. Inside, all ranks have the same key."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = job_store(rank, timedelta(seconds=config.collective_timeout_s))
    with shared_key(store, rank, world_size, config.run_dir):
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
