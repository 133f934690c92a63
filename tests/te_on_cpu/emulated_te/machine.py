"""The GPU that Transformer Engine sees: one card at a time, with CUDA 12.9 and cuDNN 9.13.

Only code of transformer_engine.* sees it: for all other code torch.cuda.is_available() and Tensor.is_cuda stay false.
`put_up` builds on the stand-in for torch.cuda in grpo_mega.megatron.compat. Streams, events, CUDA graphs and NVTX do
nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

CUDA, CUDNN = "12.9", 91300


@dataclass(frozen=True)
class Card:
    name: str
    capability: tuple[int, int]


CARDS = {
    card.name: card
    for card in (Card("A100", (8, 0)), Card("L40S", (8, 9)), Card("H100", (9, 0)), Card("B200", (10, 0)))
}
_played = [CARDS["H100"]]
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


def card() -> Card:
    return _played[-1]


@contextlib.contextmanager
def played(name: str) -> Iterator[Card]:
    """Emulate another card inside the context, for rules that depend on the card. FP8 buffers stay the buffers of an
    H100, except for MXFP8.
    """
    _played.append(CARDS[name])
    _forget()
    try:
        yield card()
    finally:
        _played.pop()
        _forget()


def _forget() -> None:
    """Clear TE's caches of the card's capability, of its support for MXFP8, and of the attention that it chose."""
    utils: Any = sys.modules.get("transformer_engine.pytorch.utils")
    quantization: Any = sys.modules.get("transformer_engine.pytorch.quantization")
    if utils is not None:
        utils._get_device_compute_capability.cache_clear()
    if hasattr(quantization, "_MXFP8_SUPPORT"):
        quantization._MXFP8_SUPPORT = None
    elif quantization is not None:
        quantization.check_mxfp8_support.cache_clear()
    attention: Any = sys.modules.get(f"{_ATTENTION}.dot_product_attention")
    if attention is not None:
        attention._attention_backends["attention_params"] = None


def put_up() -> None:
    cuda: Any = torch.cuda
    is_available = cuda.is_available
    cuda.is_available = lambda: True if _asked_by_te() else is_available()
    cuda.get_device_properties = _properties
    cuda.get_device_capability = lambda device=None: card().capability
    cuda.is_current_stream_capturing = lambda: False
    cuda.graph_pool_handle = lambda: (0, 0)
    cuda.device = lambda device: contextlib.nullcontext()  # TE 2.9 needs it
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    version: Any = torch.version
    version.cuda = version.cuda or CUDA
    _patch_tensors()
    distributed: Any = torch.distributed
    distributed._coalescing_manager = _one_by_one


class _Once:
    """A send or receive in progress."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


def waited_for_once(communicate: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Wrap a TE function that sends and receives, so that gloo waits for each transfer once. TE waits twice, and the
    second wait of gloo would never return."""
    return lambda *args: [_Once(work) for work in communicate(*args)]


def _properties(device: Any = None) -> SimpleNamespace:
    major, minor = card().capability
    return SimpleNamespace(major=major, minor=minor, multi_processor_count=132, name=card().name, total_memory=80 << 30)


def _asked_by_te() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("transformer_engine")


def _patch_tensors() -> None:
    tensor: Any = torch.Tensor
    native = torch._C.TensorBase.is_cuda
    tensor.is_cuda = property(lambda self: True if _asked_by_te() else native.__get__(self))  # type: ignore[attr-defined]
    name_of = tensor.type

    def type_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A subclass with __torch_function__ passes through compat's patch twice, and the patch then writes "cuda."
        twice.
        """
        found = name_of(self, *args, **kwargs)
        return found.replace("torch.cuda.cuda.", "torch.cuda.") if isinstance(found, str) else found

    tensor.type = type_once


@contextlib.contextmanager
def _one_by_one(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
    """Replace torch's manager of coalesced collectives. gloo copies the tensors of one call into a buffer of one dtype,
    so FP8 weights (uint8) next to bf16 weights come back as other numbers, without an error. NCCL sends each tensor as
    it is."""
    from torch.distributed import distributed_c10d as c10d

    group = group or c10d._get_default_group()
    c10d._world.pg_coalesce_state.setdefault(group, [])
    manager: Any = c10d._CoalescingManager()
    yield manager
    for op in c10d._world.pg_coalesce_state.pop(group):
        if op.dst_tensor is None:
            op.op(op.tensor, op.redop, group=group)
        elif op.redop is None:
            op.op(op.dst_tensor, op.tensor, group=group)
        else:
            op.op(op.dst_tensor, op.tensor, op.redop, group=group)
    manager.wait = lambda: None  # all operations above are synchronous
