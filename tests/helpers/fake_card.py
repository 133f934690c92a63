"""A card that is not there: fake tensors on a device of its own, and a watch that ends a pass where the host waits for
the device.

torch's Python backend gives the device `card` guards and streams, so autograd runs on it. Fake tensors have shapes and
no values: an operation whose result the host must read cannot run, on a card it would wait. Copies between host and
card wait too, unless memory is pinned, and here none is. Not seen: waits inside of a single kernel call, and Megatron's
counts of tokens per expert, which are patched as in a rehearsal.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import grpo_mega.megatron  # noqa: F401  # installs the stand-in for torch.cuda
from grpo_mega.megatron import compat

WAITING = ("nonzero", "_local_scalar_dense", "masked_select", "_unique2", "unique_consecutive", "is_nonzero", "equal")


class HostWaits(Exception):
    """The host waits for the device. The message has the operation and its place."""


class Watch(TorchDispatchMode):
    """Raise HostWaits at an operation on the card after which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # asks for a tensor's device
            return func(*args, **(kwargs or {}))
        name, tensors = func.overloadpacket.__name__, list(_tensors((args, kwargs)))
        places = {tensor.device.type for tensor in tensors} | {str(d.type) for d in [(kwargs or {}).get("device")] if d}
        self.num_operations += "card" in places
        if "card" in places and (name in WAITING or _reads_mask(name, args) or _copies(name, args, places)):
            raise HostWaits(f"{name} at {_place()}")
        return func(*args, **(kwargs or {}))


def _reads_mask(name: str, args: Any) -> bool:
    """Return True for a boolean index, except to write one value, which is a masked fill."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    is_bool = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return is_bool and not (name != "index" and args[2].numel() == 1)


def _copies(name: str, args: Any, places: set[str]) -> bool:
    """Return True for a copy between the host and the card. A single number from the host is an argument of a
    kernel.
    """
    return name in ("_to_copy", "copy_", "copy") and places == {"cpu", "card"} and args[-1].dim() > 0


def _place() -> str:
    """Return the last two places of the stack outside of torch and this file."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return ", ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.line}" for f in frames[:-3:-1])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def on_card(value: Any) -> Any:
    """Return tensors, dataclasses and collections of them with fake tensors on the card."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="card")
    if isinstance(value, (list, tuple)):
        return type(value)(on_card(one) for one in value)
    if isinstance(value, dict):
        return {key: on_card(one) for key, one in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_card(getattr(value, f.name)) for f in fields(value) if f.init})
    return value


def install() -> None:
    """Make the device in this process, for good. What asks for "cuda" gets the card."""
    _setup_privateuseone_for_python_backend("card")
    compat.CPU = torch.device("card", 0)
    torch.cuda.default_generators = {compat.CPU: torch.default_generator}  # type: ignore[assignment]


@contextmanager
def fake_tensors() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tests.helpers.rehearsal import _patched_for_fake_tensors

    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers, device=card) is a copy from the host
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _patched_for_fake_tensors():
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
