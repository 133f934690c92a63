"""Every patch of a dependency, with its reason. `install()` runs before the first import of megatron.core, and only once.

Without a GPU, Megatron-core 0.16.1 needs a stand-in for torch.cuda: it allocates on "cuda", sets devices, opens streams and
reads random states unconditionally. The stand-in sends all of that to the CPU, where everything is already in order.
tests/megatron/test_compat.py fails once a patch is no longer needed.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")


class _InOrder:
    """A stream or event on a device where every operation has finished when it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> _InOrder:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def record_event(self, *args: Any) -> _InOrder:
        return _InOrder()


@functools.cache
def install() -> bool:
    """Installs the stand-in where there is no GPU; True if it did."""
    _quieten()
    if torch.cuda.is_available():
        return False
    # SGLang's requirements bring triton along; on a CPU it serves nobody, and complains at length when the process ends.
    sys.modules.setdefault("triton", None)  # type: ignore[arg-type]
    _patch_cuda_module()
    _patch_placement()
    return True


@functools.cache
def keep_adam_steps_apart() -> None:
    """Megatron loads every entry of a parameter's optimizer state from the checkpoint's tensors. torch's Adam has a `step`
    among them, which Megatron keeps with the parameter group, so that the load would fail on it."""
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


def _quieten() -> None:
    """Megatron warns of each optional package that it did not find, and of torch's newer names for its collectives."""
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
