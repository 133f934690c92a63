"""Every patch of a dependency, with its reason. `install_patches` runs once, before the first import of megatron.core.

Without a GPU, Megatron-core needs a stand-in for torch.cuda, because it allocates on "cuda", sets devices, opens
streams and reads random states unconditionally. The stand-in redirects this to the CPU, where all operations run in
order.

Both 0.16.1 and 0.19.2 are supported. No other module asks for the version, and a version gets only the patches that it
needs. tests/megatron/test_guards.py fails once a patch is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from torch.utils._device import _device_constructors

from grpo_mega.checkpoint_io.dcp_read import COMMON, load_metadata
from grpo_mega.distributed.watchdog import recorder

IS_NEW = tuple(map(int, version("megatron-core").split(".")[:2])) >= (0, 18)  # 0.19.2, not 0.16.1
CPU = torch.device("cpu")
_ONLY_WEIGHTS, _LAYER_PICKLES = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
_NOTICES = {  # by logger: how a warning starts that no user can act on
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
}
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange")


class _InOrder:
    """A stream or event of a device on which every operation is finished when its call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def record_event(self, *args: Any) -> _InOrder:
        return _InOrder()


@functools.cache
def install_patches() -> bool:
    """Install the stand-in if there is no GPU; return True if it was installed."""
    # Megatron warns about missing optional packages, and torch about renamed collectives.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    for name in _NOTICES if IS_NEW else ():
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(tuple(_NOTICES.values())))
    # Megatron's timers import W&B. The import takes a second and makes two temporary folders per rank. If the run logs
    # to W&B, tracking/writers.py imports it on the first rank.
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # None makes the import fail
    recorder()
    # torch's cuDNN attention is wrong without an error: outputs with fewer than 8 key heads on a B200 (pytorch#193893),
    # NaN gradients with masks on Hopper cards (pytorch#196678, torch 2.13). The other backends remain.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available():
        return False
    # SGLang's requirements install triton. On a CPU it is useless and prints many warnings when the process ends.
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    if IS_NEW:  # Megatron imports triton, up to 1 GB, for kernels that only a GPU runs
        kernels: Any = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        kernels.GLOBAL_BLOCK_SIZE = kernels.paged_stash_copy_kernel = kernels.paged_stash_pop_kernel = None
        sys.modules[kernels.__name__] = kernels
    _redirect_to_cpu()
    torch.compile = _compile_for_others(torch.compile)
    return True


def _compile_for_others(compile_: Any) -> Any:
    """Return torch.compile, which leaves Megatron's functions as they are.

    Megatron compiles its fused functions, and from 0.19 on a router for inference, when it is imported. This alone
    imports torch's compiler, more than a second of CPU time per process, and a CPU does not need it.
    """

    @functools.wraps(compile_)
    def for_others(model: Any = None, **options: Any) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."):
            return compile_(model, **options)
        return model or (lambda function: function)  # with options alone it is a decorator

    return for_others


@functools.cache
def keep_adam_steps_apart() -> None:
    """Let Megatron load torch's Adam.

    Megatron expects a checkpoint tensor for every entry of a parameter's state, but saves the entry `step` with the
    parameter group.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step", None)
        original(self, model_param, tensors)
        if step is not None:
            state["step"] = step

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


@functools.cache
def beat_per_loaded_tensor() -> None:
    """Report progress per tensor, because Megatron creates the load planner itself and reads a checkpoint in one
    call.
    """
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    original = MCoreLoadPlanner.commit_tensor

    def commit_tensor(self: Any, *args: Any) -> None:
        original(self, *args)
        recorder().heartbeat()

    MCoreLoadPlanner.commit_tensor = commit_tensor


@functools.cache
def read_common_state() -> None:
    """Let 0.16 load a checkpoint of 0.19, which stores counters and parameter groups beside the tensors, not in a
    file.
    """
    if IS_NEW:
        return
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
    from torch.distributed import checkpoint

    original = TorchCommonLoadStrategy.load_common

    def load_common(self: Any, folder: Any) -> Any:
        if os.path.exists(os.path.join(folder, COMMON)):
            return original(self, folder)
        state: dict[str, Any] = {"common_state/shard_0_1": io.BytesIO()}
        checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(folder), no_dist=True)
        return state.popitem()[1][0]

    TorchCommonLoadStrategy.load_common = load_common


@contextlib.contextmanager
def only_plain_pickles() -> Iterator[None]:
    """Let torch and Megatron load only tensors and plain values from a checkpoint's files inside the context.

    torch's reader unpickles `.metadata` and a checkpoint's non-tensor objects without restriction, so a user who can
    write into a checkpoint could run code in the trainer. The environment variable restricts torch.load wherever
    Megatron or Transformer Engine calls it. torch refuses to have it set together with the variable that lifts the
    restriction. Transformer Engine 2.16 and later unpickle the scales of delayed scaling only if another variable is
    set; the caller checks these pickles first.
    """
    from torch.distributed.checkpoint import filesystem

    patched: Any = filesystem
    names = ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", _ONLY_WEIGHTS, _LAYER_PICKLES)
    variables = {name: os.environ.pop(name, None) for name in names}
    os.environ |= {_ONLY_WEIGHTS: "1", _LAYER_PICKLES: "1"}
    patched.pickle = types.SimpleNamespace(**vars(pickle) | {"load": load_metadata})
    try:
        yield
    finally:
        patched.pickle = pickle
        del os.environ[_ONLY_WEIGHTS], os.environ[_LAYER_PICKLES]
        os.environ.update({name: value for name, value in variables.items() if value is not None})


@functools.cache
def save_optimizer_state_in_place() -> None:
    """Save each parameter's optimizer state from the right offset.

    Megatron concatenates the state of a buffer's buckets without padding, but looks up each parameter at its offset in
    the padded buffer. State after a padded bucket is saved shifted, and its end is saved as zeros. A tied embedding has
    a separate bucket if pp > 1, and large models have several buckets with overlapped reductions. Loading does not use
    these offsets.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_param_state_fully_reshardable

    @functools.wraps(original)
    def state(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            before, padding = [], 0  # elements of padding before each bucket
            for bucket in buffer.buckets:
                before.append(padding)
                padding += bucket.grad_data.numel() - bucket.numel_unpadded
            buffer.param_index_map = {
                p: (start - before[b], end - before[b], b) for p, (start, end, b) in buffer.param_index_map.items()
            }
        try:
            return original(self, *args, **kwargs)
        finally:
            for buffer, places in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = places

    DistributedOptimizer.sharded_param_state_fully_reshardable = state


def index_weights_as_stored(optimizer: Any) -> None:
    """Correct the index of each weight in its parameter group.

    In a bf16 model with some fp32 weights Megatron's groups hold the fp32 weights first, but its index follows the
    buffers. A checkpoint would then exchange the states of weights of equal size, and fail for others.
    """
    for group, (fp32, bf16) in enumerate(zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)):
        for order, weight in enumerate((*fp32, *bf16)):
            optimizer.model_param_group_index_map[weight] = group, order


def transfer_class() -> Any:
    """Return the class of all transfers between pipeline stages. A benchmark times its `_communicate`: Megatron has no
    hook.

    `_communicate` returns once the transfer is done (on a GPU: once the current stream waits for it), unless
    interleaved stages overlap their transfers with computation.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    return P2PCommunicator


def graph_helper() -> Any:
    """Return Megatron's class that captures CUDA graphs. A benchmark tries it. It asks for the number of
    micro-batches.
    """
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, 1, 1, 1)  # it decides only how often to warm up
    return TECudaGraphHelper


@functools.cache
def allow_fused_weight_gradients() -> None:
    """Allow fused weight gradients without Apex.

    Megatron's column-parallel layer rejects them without Apex's kernel, although Transformer Engine's layers have their
    own kernel. Only the output layer is a Megatron layer, and its product is computed elsewhere.
    """
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True


@functools.cache
def patch_moe() -> None:
    """Let MoE models run without Transformer Engine or a GPU.

    Megatron's router needs a name that only TE's import defines. Its dispatcher needs token counts as an array, but
    converts tensors to arrays only on a GPU. gloo gathers only equal parts, but experts that are sharded over tp have
    different token counts, so the parts are padded.
    """
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    patched: Any = moe_utils
    if not hasattr(moe_utils, "te_general_gemm"):
        patched.te_general_gemm = None
    move = moe_utils.maybe_move_tensor_to_cpu

    def as_array(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = as_array
    gather = mappings._gather_along_first_dim

    def gather_padded(values: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(values, group, None, use_global_buffer)
        longest = int(max(output_split_sizes))
        padded = torch.cat((values, values.new_zeros(longest - len(values), *values.shape[1:])))
        parts = gather(padded, group).split(longest)
        return torch.cat([part[: int(size)] for part, size in zip(parts, output_split_sizes, strict=True)])

    if not torch.cuda.is_available():
        mappings._gather_along_first_dim = gather_padded


def mark_sharded_weights(model: Any) -> None:
    """Mark the weights that tensor parallelism cuts.

    Megatron 0.16 marks weights only when it initializes them, and its gradient norm counts weights without a mark only
    on the first rank.
    """
    from megatron.core import tensor_parallel

    cuts = {"ColumnParallelLinear": 0, "VocabParallelEmbedding": 0, "RowParallelLinear": 1}
    for module in () if IS_NEW else model.modules():
        for kind, dim in cuts.items():
            if isinstance(module, getattr(tensor_parallel, kind)) and module.weight is not None:
                tensor_parallel.set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


def split_tensor_factory() -> Any:
    """Return Megatron's function that stores a tensor's sections as separate tensors of a checkpoint."""
    if IS_NEW:
        from megatron.core.ssm.utils import _split_tensor_factory
    else:
        from megatron.core.ssm.gated_delta_net import _split_tensor_factory
    return _split_tensor_factory


@functools.cache
def patch_latent_attention() -> None:
    """Let multi-latent attention run without Transformer Engine, as its spec says, and skip its table of angles.

    Nothing here reads the table of angles, and Megatron splits it over context-parallel ranks in pinned memory.

    0.16 assumes that TE is installed if Megatron's own wrapper can be imported, and then calls isinstance with a mock.
    0.19 knows modelopt's Linear only with TE. It also replaces parts of the spec: for any norm of a latent it sets a
    second norm before the query projection of models without q_lora (DeepSeek-V2-Lite), which have none there.
    """
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.transformer import multi_latent_attention

    patched: Any = multi_latent_attention
    YarnRotaryEmbedding._set_cos_sin_cache = lambda self, *args, **kwargs: None
    if not IS_NEW:
        patched.HAVE_TE = isinstance(patched.TELinear, type)
        return
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer.identity_op import IdentityOp

    parts = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
    patched.Linear = Linear
    patched.MLASelfAttention._resolve_qk_norm_config = lambda self, spec: {
        part: getattr(spec, part) or IdentityOp for part in parts
    }


@functools.cache
def patch_gated_delta_net() -> None:
    """Let the gated delta net run without flash-linear-attention.

    Megatron's module refuses to be built without it, although its path in plain torch needs only `l2norm`. 0.19 also
    requires a kernel.
    """
    from megatron.core.ssm import gated_delta_net

    def l2norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    patched: Any = gated_delta_net
    if patched.HAVE_FLA:
        return
    patched.HAVE_FLA, patched.l2norm = True, l2norm
    if IS_NEW:
        patched.common.HAVE_FLA = True
        patched.gdn.chunk_gated_delta_rule = patched.torch_chunk_gated_delta_rule


def offload_from_any_device() -> None:
    """Let Megatron's hybrid optimizer work without a GPU. Nothing changes with a GPU.

    It copies only parameters with `is_cuda` to the host, and fails at its first step if it has no copies.
    """
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    def groups_of(self: Any, offload_fraction: float) -> tuple[Any, ...]:
        assert offload_fraction == 1
        params = [p for group in self.param_groups for p in group["params"]]
        copies = {p: p.detach().clone().float() for p in params}
        groups = [{**group, "params": [copies[p] for p in group["params"]]} for group in self.param_groups]
        groups = [group for group in groups if group["params"]]
        return groups, [], copies, {copy: p for p, copy in copies.items()}, dict(copies)

    if not torch.cuda.is_available():
        HybridDeviceOptimizer._get_sub_optimizer_param_groups = groups_of


def _redirect_to_cpu() -> None:
    """Replace torch.cuda's functions, and let tensors that are created on or moved to "cuda" be on the CPU."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.is_initialized = lambda: True
    for name in ("synchronize", "empty_cache", "set_device", "_lazy_init", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.Stream = cuda.Event = _InOrder
    cuda.current_stream = cuda.default_stream = lambda *args: _InOrder()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.default_generators = {CPU: torch.default_generator}  # Megatron's checkpointed random states index it

    # `with torch.device("meta")` recognizes factories by identity, from a table made at first use. Make the table
    # before the patch; otherwise models that transformers loads from a checkpoint keep uninitialized rotary
    # frequencies.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    move, cast = tensor.to, tensor.type
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.to = lambda self, *args, **kwargs: move(
        self, *map(_cpu_for_cuda, args), **{k: _cpu_for_cuda(v) for k, v in kwargs.items()}
    )
    # Megatron reads device and dtype from the type's name: "torch.cuda.FloatTensor".
    tensor.type = lambda self, *args, **kwargs: (
        cast(self, *args, **kwargs) if args or kwargs else cast(self).replace("torch.", "torch.cuda.", 1)
    )


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        return factory(*args, **kwargs)

    return wrapped


def _cpu_for_cuda(value: Any) -> Any:
    is_cuda = (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return CPU if is_cuda else value
