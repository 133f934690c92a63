"""Every patch of a dependency, with its reason. `install()` runs before the first import of megatron.core, and only once.

Without a GPU, Megatron-core 0.16.1 needs a stand-in for torch.cuda: it allocates on "cuda", sets devices, opens streams and
reads random states unconditionally. The stand-in sends all of that to the CPU, where everything is already in order.
tests/megatron/test_guards.py fails once a patch is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._device import _device_constructors

from grpo_mega.distributed.recorder import recorder
from grpo_mega.formats.dcp_read import load_metadata

CPU = torch.device("cpu")
_ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
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
def install() -> bool:
    """Install the stand-in if there is no GPU; return True if it was installed."""
    _quieten()
    _hide_wandb()
    recorder()
    if torch.cuda.is_available():
        return False
    # SGLang's requirements bring triton along; on a CPU it is of no use, and prints many warnings when the process ends.
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    _patch_cuda_module()
    _patch_placement()
    _leave_functions_uncompiled()
    return True


def _hide_wandb() -> None:
    """Keep Megatron's timers from importing W&B, which takes a second and makes two temporary folders in every rank. Where the
    run logs to it, observe/wandb_writer.py imports it on the first rank."""
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # makes the import fail


def _leave_functions_uncompiled() -> None:
    """Take the place of megatron.core.jit, whose decorator compiles Megatron's fused functions.

    That decorator alone imports torch's compiler, more than a second of CPU time per process, and a CPU does not need it.
    """
    jit: Any = types.ModuleType("megatron.core.jit")
    jit.jit_fuser = jit.noop_decorator = lambda function: function
    jit.enable_jit_fuser = jit.disable_jit_fuser = lambda: None
    sys.modules["megatron.core.jit"] = jit


@functools.cache
def keep_adam_steps_apart() -> None:
    """Let Megatron load torch's Adam: it expects a checkpoint's tensor for every entry of a parameter's state, but saves Adam's
    `step`, which is one of these entries, with the parameter group."""
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
    """Report progress per tensor: Megatron makes the planner of a load itself, and reads a whole checkpoint in one call."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner

    original = MCoreLoadPlanner.commit_tensor

    def commit_tensor(self: Any, *args: Any) -> None:
        original(self, *args)
        recorder().beat()

    MCoreLoadPlanner.commit_tensor = commit_tensor


@contextlib.contextmanager
def only_plain_pickles() -> Iterator[None]:
    """Have torch and Megatron make only tensors and plain values from the files of a checkpoint, while the context lasts.

    torch's reader unpickles `.metadata` and the objects among a checkpoint's tensors without restriction: a user who can write
    into a checkpoint could run code in the trainer. The variable restricts torch.load wherever Megatron or Transformer Engine
    calls it; torch refuses it beside the variable that lifts the restriction.
    """
    from torch.distributed.checkpoint import filesystem

    patched: Any = filesystem
    variables = {name: os.environ.pop(name, None) for name in ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", _ONLY_WEIGHTS)}
    os.environ[_ONLY_WEIGHTS] = "1"
    patched.pickle = types.SimpleNamespace(**vars(pickle) | {"load": load_metadata})
    try:
        yield
    finally:
        patched.pickle = pickle
        del os.environ[_ONLY_WEIGHTS]
        os.environ.update({name: value for name, value in variables.items() if value is not None})


@functools.cache
def save_optimizer_state_in_place() -> None:
    """Save each parameter's optimizer state from its right place.

    Megatron concatenates the state of a buffer's buckets without their padding, but looks up each parameter at its place in the
    padded buffer: whatever follows a padded bucket is saved shifted, and its end as zeros. A tied embedding has a bucket of its
    own if pp > 1, and with overlapped reductions large models have several. Loading does not use these places.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_param_state_fully_reshardable

    @functools.wraps(original)
    def state(self: Any, *args: Any, **kwargs: Any) -> Any:
        padded = [buffer.param_index_map for buffer in self.buffers]
        for buffer in self.buffers:
            buffer.param_index_map = _places_without_padding(buffer)
        try:
            return original(self, *args, **kwargs)
        finally:
            for buffer, places in zip(self.buffers, padded, strict=True):
                buffer.param_index_map = places

    DistributedOptimizer.sharded_param_state_fully_reshardable = state


def _places_without_padding(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return (start, end, bucket) by parameter, as if the buckets of Megatron's buffer followed each other directly."""
    before, padding = [], 0  # padding in front of each bucket
    for bucket in buffer.buckets:
        before.append(padding)
        padding += bucket.grad_data.numel() - bucket.numel_unpadded
    return {p: (start - before[b], end - before[b], b) for p, (start, end, b) in buffer.param_index_map.items()}


def transfer_class() -> Any:
    """Return the class whose function `_communicate` makes all transfers between pipeline stages, for a benchmark to time them:
    Megatron has no hook.

    The function returns once the transfer is done (on a GPU: once the current stream waits for it), except if interleaved
    stages overlap their transfers with computation.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    return P2PCommunicator


@functools.cache
def allow_fused_weight_gradients() -> None:
    """Allow fused weight gradients without Apex.

    Megatron's column-parallel layer rejects them without Apex's kernel, though Transformer Engine's layers have their own. Only
    the output layer is of Megatron's kind, and its product is computed elsewhere.
    """
    from megatron.core.tensor_parallel import layers

    layers._grad_accum_fusion_available = True


@functools.cache
def patch_moe() -> None:
    """Let MoE models run without Transformer Engine or a GPU: Megatron's router needs a name that only TE's import defines, and
    its dispatcher needs token counts as an array, to which it converts tensors on a GPU only."""
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
    if not torch.cuda.is_available():
        _pad_uneven_gathers()


@functools.cache
def patch_latent_attention() -> None:
    """Let multi-latent attention run without Transformer Engine: Megatron's module believes that it is there wherever its own
    wrapper can be imported, and then asks isinstance of a mock. Leave out its table of angles, which nothing here reads, and
    which it cuts into as many parts as context-parallel ranks, in pinned memory."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
    from megatron.core.transformer import multi_latent_attention

    patched: Any = multi_latent_attention
    if not isinstance(patched.TELinear, type):
        patched.HAVE_TE = False
    YarnRotaryEmbedding._set_cos_sin_cache = lambda self, *args, **kwargs: None


def _pad_uneven_gathers() -> None:
    """Pad to equal parts, as gloo requires: experts that are sharded over tp have different numbers of tokens."""
    from megatron.core.tensor_parallel import mappings

    patched: Any = mappings
    gather = mappings._gather_along_first_dim

    def gather_padded(values: Any, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(values, group, None, use_global_buffer)
        longest = int(max(output_split_sizes))
        padded = torch.cat((values, values.new_zeros(longest - len(values), *values.shape[1:])))
        parts = gather(padded, group).split(longest)
        return torch.cat([part[: int(size)] for part, size in zip(parts, output_split_sizes, strict=True)])

    patched._gather_along_first_dim = gather_padded


def _quieten() -> None:
    """Silence Megatron's warnings of optional packages that are missing, and of torch's renamed collectives."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def _patch_cuda_module() -> None:
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


def _patch_placement() -> None:
    # `with torch.device("meta")` knows the factories by identity, from a table made at its first use; without them the models
    # that transformers loads from a checkpoint keep rotary frequencies that nothing has set.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    move, cast = tensor.to, tensor.type
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.to = lambda self, *args, **kwargs: move(
        self, *map(_cpu_for_cuda, args), **{k: _cpu_for_cuda(v) for k, v in kwargs.items()}
    )
    # Megatron tells device and dtype from the type's name: "torch.cuda.FloatTensor".
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
