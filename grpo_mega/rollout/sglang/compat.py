"""Changes to SGLang 0.5.21, in its own processes only. A test fails once a change is no longer needed."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

STUBBED = ("torchvision", "sgl_kernel")  # imported by SGLang; missing where torch is CPU-only


def hide_megatron() -> None:
    """Keep SGLang's debug dumper from importing Megatron-core, which would take a second, and memory on a GPU."""
    sys.modules["megatron"] = None  # type: ignore[assignment]  # makes the import fail


def fork_children() -> None:
    """Have SGLang fork its processes. It spawns them, and each then imports everything again.

    Forking is safe without CUDA: SGLang starts its processes before it starts a thread or an event loop.
    """
    set_start_method = multiprocessing.set_start_method

    def fork_instead(*_: Any, **__: Any) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = fork_instead


def drop_idle_warnings() -> None:
    """Keep irrelevant pages out of the log, in which users look for the cause of a failure.

    These are a warning per endpoint that answers to GET and POST, whenever the list of endpoints is read; and a traceback,
    because a server that skips its warm-up calls its own /freeze_gc before it listens. server.py makes that call.
    """
    warnings.filterwarnings("ignore", message="Duplicate Operation ID")
    server_log = logging.getLogger("sglang.srt.entrypoints.http_server")
    server_log.addFilter(lambda record: "freeze_gc failed" not in record.getMessage())


def allow_routes_on_cpu() -> None:
    """Let a server on a CPU record the choices of routers: it would register their buffer with CUDA."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_: None


def install_stubs() -> None:
    """Make packages that do not exist for a CPU-only torch importable, not callable; may be called more than once.

    For the server's processes only: elsewhere transformers would believe that torchvision is there.
    """
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
