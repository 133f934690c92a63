"""Import Transformer Engine's wheel over the emulated extension, in this process.

Call `install(version)` before anything imports TE or megatron.core: if the bare wheel can be imported and nothing is
loaded, Megatron's import raises ("empty meta package"). Only this process gets the wheel's folder, in sys.path, so
child processes do not find it. torch.compile is off in TE, so TE's elementwise functions round as in eager torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.te_on_cpu.emulated_te import extension, machine, permutation, stubs
from tests.te_on_cpu.emulated_te.launcher import wheel

TE = "transformer_engine"
SETTINGS = {
    "NVTE_TORCH_COMPILE": "0",
    "NVTE_PROJECT_BUILDING": "1",  # otherwise transformer_engine.common loads CUDA's libraries
    "NVTE_FRAMEWORK": "pytorch",
}


@functools.cache
def install(version: str) -> None:
    """Import Transformer Engine `version` for a machine with one H100."""
    from grpo_mega.megatron import compat

    if torch.cuda.is_available():
        raise RuntimeError("emulate Transformer Engine only on machines without a GPU")
    compat.install_patches()
    sys.path.insert(0, str(wheel(version)))
    machine.put_up()
    sys.modules[extension.NAME] = extension.module(version)
    with _environment(SETTINGS):
        _import()
    permutation.install()
    _everywhere("canonicalize_device", lambda function: lambda device: torch.device("cpu"))
    _everywhere("flash_attn_p2p_communicate", machine.waited_for_once)


def _import() -> None:
    common = _common()
    # These modules must see torch's real view of Triton, so import them before the stub replaces Triton.
    for name in ("torch._dynamo", "torch._inductor"):
        importlib.import_module(name)
    with stubs.while_importing():
        importlib.import_module(f"{TE}.pytorch")
    sys.modules[TE].common = common  # type: ignore[attr-defined]


def _common() -> Any:
    """Return transformer_engine.common, imported alone. transformer_engine/__init__.py also imports .pytorch, which
    would load the extension's shared object through a function of .common; this function is replaced here."""
    spec = importlib.util.find_spec(TE)
    assert spec is not None and spec.submodule_search_locations, "the wheel contains no package"
    shell = types.ModuleType(TE)
    shell.__path__, shell.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules[TE] = shell
    common: Any = importlib.import_module(f"{TE}.common")
    common.load_framework_extension = lambda framework: None
    del sys.modules[TE]
    return common


def _everywhere(name: str, replacement: Callable[[Any], Any]) -> None:
    """Replace a TE function in all TE modules that imported it by name. `replacement` makes the new function from the
    old one."""
    for module in [m for n, m in sys.modules.items() if n.startswith(f"{TE}.") and hasattr(m, name)]:
        setattr(module, name, replacement(getattr(module, name)))


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set variables that are read at import, then restore them, so child processes do not inherit them."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
