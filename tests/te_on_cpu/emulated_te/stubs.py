"""Stubs of modules that Transformer Engine imports and a CPU lacks: Triton, ONNX and NVIDIA's inspection.

With them TE's Triton kernels (permutation for MoE models, cross-entropy, padding) can be imported. A launch raises with
the kernel's name. After the import, missing modules are missing again for all other code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

# Submodules that TE imports, per package.
CHILDREN = {
    "onnx": (),
    "onnxscript": ("onnx_opset", "onnx_types"),
    "nvdlfw_inspect": ("api", "logging", "registry", "utils", "config_manager"),
}
TRITON = ("triton", "triton.language", "triton.language.standard")


class _Anything:
    """An attribute of a stub: it can be called, indexed, inherited from, and used as a decorator."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], _Anything):
            return _Kernel(args[0])
        return _Anything(f"{self._name}()")

    def __getitem__(self, item: Any) -> _Anything:
        return _Anything(f"{self._name}[]")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)


class _Kernel:
    """A Triton kernel that cannot be launched."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> Any:
        raise NotImplementedError(f"the Triton kernel {self.__name__} is not emulated")  # type: ignore[attr-defined]


@contextlib.contextmanager
def while_importing() -> Iterator[None]:
    """Install stubs for missing modules inside the context, and in the place of an installed Triton."""
    missing = [name for name in CHILDREN if importlib.util.find_spec(name) is None]
    names = [*TRITON, *(full for name in missing for full in (name, *(f"{name}.{child}" for child in CHILDREN[name])))]
    real = [name for name in sys.modules if name.partition(".")[0] == "triton"]
    before = {name: sys.modules.get(name, ...) for name in (*names, *real)}
    for name in real:
        del sys.modules[name]
    for name in names:
        if sys.modules.get(name) is None:
            sys.modules[name] = _module(name)
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, sys.modules[name])
    try:
        yield
    finally:
        for name, found in before.items():
            if found is ...:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = found  # type: ignore[assignment]


def _module(name: str) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__, module.__version__ = [], "3.5.0"

    def attribute(wanted: str) -> _Anything:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return _Anything(f"{name}.{wanted}")

    module.__getattr__ = attribute
    if name == "triton":  # TE computes launch parameters with it
        module.cdiv = lambda a, b: -(-a // b)
        module.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    return module
