"""The GPU installation, checked as text. tests/gpu resolves the same requirements on a machine with a GPU."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "install_gpu.sh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def dry_run() -> list[str]:
    result = subprocess.run(["bash", str(SCRIPT), "--dry-run"], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


def test_torch_and_build_tools_are_installed_before_the_extension() -> None:
    first, second, third = dry_run()
    [torch] = [text for text in PROJECT["dependencies"] if text.startswith("torch==")]
    assert f"pip install --disable-pip-version-check {torch} setuptools wheel packaging ninja pybind11" in first
    assert "--no-build-isolation transformer-engine[core_cu13,pytorch]>=2.9,<2.12" in second
    assert third == "ensure_env gpu"


def test_the_versions_are_accepted_by_megatron_and_sglang() -> None:
    [wanted] = re.findall(r'TRANSFORMER_ENGINE="(.*)"', SCRIPT.read_text())
    [theirs] = [
        found.specifier
        for text in requires("megatron-core") or []
        if (found := Requirement(text)).name == "transformer-engine" and found.specifier
    ]
    for version in ("2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0"):
        assert (version in SpecifierSet(wanted)) == (version in theirs), version
    [extra] = PROJECT["optional-dependencies"]["gpu"]
    kernels = [
        text for text in requires("sglang") or [] if text.startswith(("flashinfer_python[", "nvidia-cutlass-dsl["))
    ]
    assert extra.startswith("sglang==") and kernels and all("[cu13]" in text for text in kernels)


def test_the_extra_alone_builds_no_extension() -> None:
    """pip would compile it in an isolated environment against another torch."""
    assert not any("transformer" in text.partition("#")[0] for text in PROJECT["optional-dependencies"]["gpu"])


def test_another_option_is_refused_before_anything_is_installed() -> None:
    result = subprocess.run(["bash", str(SCRIPT), "--cpu"], capture_output=True, text=True)
    assert (
        result.returncode == 1
        and result.stderr == "install_gpu.sh: error: --cpu is not known; the only option is --dry-run\n"
    )


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_files_and_functions_used_by_an_image_exist(name: str) -> None:
    text = (ROOT / ".github" / "docker" / f"{name}.Dockerfile").read_text()
    calls = re.findall(r"(?:examples|tests|tools)/[\w./-]+\.(?:sh|txt)", text)
    assert calls and all((ROOT / call).exists() for call in calls), calls
    functions = set(re.findall(r"\b(ensure_\w+)", text))
    assert functions <= set(re.findall(r"^(ensure_\w+)\(\)", (ROOT / "examples" / "env.sh").read_text(), re.MULTILINE))
    if name == "cpu":
        ours = (ROOT / "tests" / "run.sh").read_text()
        assert functions == set(re.findall(r"^ *(ensure_\w+)", ours, re.MULTILINE)), "CI creates another environment"
        assert all(version in text for version in re.search(r"^ *ensure_te (.*)$", ours, re.MULTILINE)[1].split())  # type: ignore[index]
    else:
        assert "Not yet run" in text
