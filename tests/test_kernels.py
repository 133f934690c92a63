"""Whose kernels a run uses; and that the web package called apex is never taken for NVIDIA's."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mega.errors import ConfigError
from grpo_mega.kernels import check_apex, choose

Install = Callable[..., None]
TE = ("transformer_engine/__init__.py", "transformer_engine_torch.py")
NVIDIA = ("apex/__init__.py", "apex/multi_tensor_apply/__init__.py", "apex/optimizers/__init__.py")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts files on the path, that fail if they are imported."""

    def with_files(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("raise AssertionError('imported')\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    for name in ("transformer_engine", "apex"):
        if importlib.util.find_spec(name) is not None:
            pytest.skip(f"{name} is installed here")
    # Packages are found on the path without being imported, unless a submodule is looked for by import.
    assert "apex" not in sys.modules
    return with_files


def test_on_a_cpu_there_are_none_but_those_of_torch(install: Install) -> None:
    install(*TE)
    kernels = choose(is_cuda=False)
    assert not kernels.fuses_weight_gradients
    assert kernels.line() == "kernels: layers, attention and norms are torch's, and so is Adam (no others run on a CPU)"


def test_transformer_engine_goes_before_apex(install: Install) -> None:
    install(*TE, "fused_weight_gradient_mlp_cuda.py", *NVIDIA)
    kernels = choose(is_cuda=True)
    assert kernels.transformer_engine and not kernels.apex_adam and kernels.fuses_weight_gradients
    assert "are Transformer Engine's" in kernels.line()


def test_transformer_engine_without_its_part_for_torch_is_none(install: Install) -> None:
    install(TE[0])
    kernels = choose(is_cuda=True)
    assert not kernels.transformer_engine and "is not installed with its part for torch" in kernels.line()


def test_apex_fills_in_for_transformer_engine(install: Install) -> None:
    install("fused_weight_gradient_mlp_cuda.py", *NVIDIA)
    kernels = choose(is_cuda=True)
    assert kernels.apex_adam and kernels.apex_weight_gradients and not kernels.transformer_engine
    assert kernels.line() == (
        "kernels: layers, attention and norms are torch's; Adam and gradient accumulation NVIDIA Apex's "
        "(Transformer Engine is not installed)"
    )


def test_without_both_all_are_those_of_torch(install: Install) -> None:
    kernels = choose(is_cuda=True)
    assert not kernels.fuses_weight_gradients and not kernels.apex_adam
    assert kernels.line().endswith("and so is Adam (Transformer Engine is not installed, nor is NVIDIA Apex)")


@pytest.mark.parametrize("is_cuda", [False, True])
def test_the_web_package_called_apex_is_refused(install: Install, is_cuda: bool) -> None:
    install("apex/__init__.py", "apex/lib/libapex.py", "apex/models.py")  # as that package lies
    with pytest.raises(ConfigError, match=r"apex is not NVIDIA Apex but an unrelated web package.*pip uninstall apex"):
        choose(is_cuda=is_cuda)


def test_nvidias_apex_passes(install: Install) -> None:
    install(*NVIDIA)
    check_apex()
