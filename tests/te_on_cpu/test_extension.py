"""The emulation as a whole: it has every name that Transformer Engine uses, and it changes nothing else."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformer_engine
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes

from grpo_mega.distributed.device import Device
from tests.te_on_cpu.emulated_te import machine, stubs
from tests.te_on_cpu.emulated_te.extension import missing

WHEEL = Path(transformer_engine.__file__).parent


def test_every_name_that_transformer_engine_uses_is_there() -> None:
    names: set[str] = set()
    for path in (WHEEL / "pytorch").rglob("*.py"):
        if path.name == "onnx_extensions.py":  # contains names of ONNX operators
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tex":
                names.add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module == "transformer_engine_torch":
                names |= {alias.name for alias in node.names}
    absent = sorted(name for name in names - {"*"} if not hasattr(tex, name))
    assert len(names) > 100 and not absent, f"emulate these, or list them in missing.py: {absent}"


def test_a_function_that_is_not_emulated_raises_by_name() -> None:
    for name in missing.NAMES.split():
        with pytest.raises(NotImplementedError, match=f"{name} is not emulated"):
            getattr(tex, name)()
    assert not hasattr(tex, "some_kernel_of_tomorrow")
    with pytest.raises(NotImplementedError, match="some_kernel_of_tomorrow is not emulated"):
        _ = tex.some_kernel_of_tomorrow


def test_recipes_that_the_card_lacks_are_refused() -> None:
    layer = te.Linear(32, 32, params_dtype=torch.bfloat16)
    with pytest.raises((AssertionError, RuntimeError), match="MXFP8"):  # noqa: SIM117
        with te.fp8_autocast(enabled=True, fp8_recipe=recipes.MXFP8BlockScaling()):
            layer(torch.zeros(32, 32, dtype=torch.bfloat16))


def test_tritons_kernels_say_their_name_when_they_are_launched() -> None:
    logits, targets = torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"(online_softmax|cross_entropy_forward)_kernel is not emulated"):
        te.parallel_cross_entropy(logits, targets, 0.0, False, None)


def test_an_installed_triton_is_hidden_while_transformer_engine_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels would compile for a GPU. Otherwise the process keeps it."""
    real = {name: ModuleType(name) for name in ("triton", "triton.language", "triton.backends")}
    for name, module in real.items():
        monkeypatch.setitem(sys.modules, name, module)
    with stubs.while_importing():
        language = importlib.import_module("triton.language")
        assert language not in real.values() and "triton.backends" not in sys.modules
        kernel = sys.modules["triton"].jit(lambda pointer: pointer)
        with pytest.raises(NotImplementedError, match="is not emulated"):
            kernel[1](0)
    assert all(sys.modules[name] is module for name, module in real.items())


def test_only_transformer_engine_sees_a_gpu() -> None:
    assert not torch.cuda.is_available() and not torch.zeros(1).is_cuda
    assert torch.cuda.get_device_capability() == machine.card().capability == (9, 0)
    assert Device("cpu", torch.device("cpu")).capability == (9, 0) and not Device("cpu", torch.device("cpu")).is_cuda
    assert importlib.util.find_spec("onnx") is None or "onnx" in sys.modules
    for name in ("NVTE_PROJECT_BUILDING", "NVTE_FRAMEWORK", "NVTE_TORCH_COMPILE"):
        assert name not in os.environ


def test_a_process_that_is_started_from_here_knows_nothing_of_the_wheel() -> None:
    code = "import importlib.util as u, megatron.core; assert u.find_spec('transformer_engine') is None; print('plain')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "plain", result.stderr


def test_coalesced_collectives_keep_tensors_of_different_dtypes_apart(only_member: None) -> None:
    """torch's manager mixes them up on gloo; if it did not, the stand-in would no longer be needed."""
    sources = [torch.arange(8, dtype=torch.uint8), torch.linspace(-3, 3, 5).bfloat16(), torch.randn(3)]

    def gathered(coalescing_manager: Any) -> list[torch.Tensor]:
        found = [torch.zeros_like(t) for t in sources]
        with coalescing_manager(async_ops=True) as manager:
            for out, t in zip(found, sources, strict=True):
                dist.all_gather_into_tensor(out, t, async_op=True)
        manager.wait()
        return found

    as_they_are, mixed_up = gathered(dist._coalescing_manager), gathered(dist.distributed_c10d._coalescing_manager)
    assert all(torch.equal(a, b) for a, b in zip(as_they_are, sources, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(mixed_up, sources, strict=True))
