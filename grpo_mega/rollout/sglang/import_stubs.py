"""Stand-ins for packages that SGLang imports and that do not exist for a CPU-only torch: importable, not callable.

For the server's processes only: elsewhere transformers would believe that torchvision is there. Real packages win.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

STUBBED = ("torchvision", "sgl_kernel")


def install() -> None:
    """Append the finder of stubs; may be called more than once."""
    if not any(isinstance(finder, StubFinder) for finder in sys.meta_path):
        sys.meta_path.append(StubFinder())  # last, so that real packages win


class StubFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in STUBBED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Stub(ModuleType):
    """A module of which every attribute is another stub."""

    __version__ = "0.28.0"  # of the torchvision that belongs to torch 2.13

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        child = Stub(f"{self.__name__}.{name}")
        setattr(self, name, child)
        return child

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} does not exist for a CPU-only torch")
