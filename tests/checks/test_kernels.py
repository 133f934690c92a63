"""The kernels that a run uses. The web package named apex is never mistaken for NVIDIA's."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_mega.distributed.kernels import check_apex, choose_kernels, cuda_version
from grpo_mega.errors import ConfigError

Install = Callable[..., None]
TE = ("transformer_engine/__init__.py", "transformer_engine_torch.py")
NVIDIA = ("apex/__init__.py", "apex/multi_tensor_apply/__init__.py", "apex/optimizers/__init__.py")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that puts files on the path. The files fail if they are imported."""

    def with_files(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("raise AssertionError('imported')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    for name in ("transformer_engine", "apex"):
        if importlib.util.find_spec(name) is not None:
            pytest.skip(f"{name} is installed here")
    # Packages are found on the path without an import. Searching for a submodule would import its package.
    assert "apex" not in sys.modules
    return with_files


def test_on_a_cpu_all_kernels_are_from_torch() -> None:
    kernels = choose_kernels(is_cuda=False, transformer_engine=True)
    assert not kernels.fuses_weight_gradients
    assert kernels.line() == "kernels: layers, attention and norms are torch's, and so is Adam (no others run on a CPU)"


def test_transformer_engine_goes_before_apex(install: Install) -> None:
    install(*NVIDIA)
    kernels = choose_kernels(is_cuda=True, transformer_engine=True, apex_weight_gradients=True)
    assert kernels.transformer_engine and not kernels.apex_adam and kernels.fuses_weight_gradients
    assert "are Transformer Engine's" in kernels.line()


def test_apex_fills_in_for_transformer_engine(install: Install) -> None:
    install("fused_weight_gradient_mlp_cuda.py", *NVIDIA)
    kernels = choose_kernels(is_cuda=True, apex_adam=True, apex_weight_gradients=True)
    assert kernels.apex_adam and kernels.apex_weight_gradients and not kernels.transformer_engine
    assert (
        kernels.line()
        == "kernels: layers, attention and norms are torch's; Adam and gradient accumulation NVIDIA Apex's "
        "(Transformer Engine is not installed)"
    )


def test_without_both_all_kernels_are_from_torch(install: Install) -> None:
    kernels = choose_kernels(is_cuda=True)
    assert not kernels.fuses_weight_gradients and not kernels.apex_adam
    assert kernels.line().endswith("and so is Adam (Transformer Engine is not installed, nor is NVIDIA Apex)")


ASK = """
import torch
from grpo_mega.megatron.loaded_kernels import check_loads, in_use
from grpo_mega.errors import ConfigError
from grpo_mega.distributed.device import Device
try:
    check_loads()
except ConfigError as error:
    print("refused:", error)
else:
    from megatron.core.models.gpt import gpt_layer_specs
    print("Megatron found it:", gpt_layer_specs.HAVE_TE)
    print(in_use(Device("cuda", torch.device("cuda"))).line())
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            "ModuleNotFoundError('No module named einops')",
            r"Megatron found it: False\nkernels: layers, attention and norms are torch's, and so is Adam \(the"
            r" installed "
            r"Transformer Engine does not load: ModuleNotFoundError: No module named einops; NVIDIA Apex is not"
            r" installed\)$",
        ),
        (
            "ImportError('transformer_engine_torch.so: undefined symbol: _ZN3c10')",
            r"refused: .* does not load \(ImportError: \S+: undefined symbol: _ZN3c10\); .*pip uninstall it$",
        ),
        (
            "RuntimeError('Found empty `transformer-engine` meta package installed.')",
            r"refused: the installed Transformer Engine \(no version\) does not load \(RuntimeError: Found empty "
            r"`transformer-engine` meta package installed\.\); .*pip uninstall it$",
        ),
    ],
)
def test_megatron_reports_a_transformer_engine_that_does_not_load(
    tmp_path: Path, install: Install, error: str, expected: str
) -> None:
    """Both of its parts are on the path. Megatron continues only if a module is missing, but not after other errors."""
    for name in TE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"raise {error}\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert re.search(expected, result.stdout.strip()), result.stdout


def test_the_cuda_version_of_torch_is_read_without_importing_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cuda_version() == torch.version.cuda
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "torch" / "version.py").write_text(
        "from typing import Optional\ncuda: Optional[str] = '12.6'\nhip = None\n"
    )
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cuda_version() == "12.6"


@pytest.mark.parametrize("is_cuda", [False, True])
def test_the_web_package_called_apex_is_refused(install: Install, is_cuda: bool) -> None:
    install("apex/__init__.py", "apex/lib/libapex.py", "apex/models.py")  # files of the web package
    with pytest.raises(ConfigError, match=r"apex is not NVIDIA Apex but an unrelated web package.*pip uninstall apex"):
        choose_kernels(is_cuda=is_cuda)


def test_apex_of_nvidia_is_accepted(install: Install) -> None:
    install(*NVIDIA)
    check_apex()
