"""The GPU installation, checked as text. tests/gpu resolves the same requirements on a machine with a GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_mega.distributed.versions import SETS, installed_set

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tools" / "install_gpu.sh"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


TRANSFORMER_ENGINE = dict(re.findall(r'\[(\w+)\]="([^"]*)"', SCRIPT.read_text()))


PYTHONS = {"3.11": "one", "3.12": "two", "3.13": "two"}


@pytest.mark.parametrize("python", PYTHONS)
def test_torch_and_build_tools_are_installed_before_the_extension(python: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f"#!/bin/bash\necho {python}\n")
    (tmp_path / "bin/python").chmod(0o755)
    environment = os.environ | {"GRPO_MEGA_VENV": str(tmp_path)}
    command = ["bash", str(SCRIPT), "--dry-run"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, second, third = result.stdout.splitlines()
    wanted = {text.partition("==")[0]: text for text in SETS[PYTHONS[python]].split()}
    [engine] = [text for text in wanted.values() if text.startswith("transformer-engine")]
    assert (
        f"pip install --disable-pip-version-check {wanted['torch']} setuptools wheel packaging ninja pybind11" in first
    )
    assert f"--no-build-isolation transformer-engine[core_cu13,pytorch]{engine[len('transformer-engine') :]}" in second
    assert third == "ensure_env gpu"


@pytest.mark.parametrize("python", PYTHONS)
def test_pip_chooses_the_set_by_the_python_version(python: str) -> None:
    texts = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
    chosen = [
        one for one in map(Requirement, texts) if not one.marker or one.marker.evaluate({"python_version": python})
    ]
    found = {one.name: str(one.specifier) for one in chosen}
    assert len(found) == len(chosen)
    wanted = {one.name: str(one.specifier) for one in map(Requirement, SETS[PYTHONS[python]].split())}
    del wanted["transformer-engine"]  # tools/install_gpu.sh installs it
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.skipif(installed_set().record != "one", reason="Megatron-core 0.19 names no version of Transformer Engine")
def test_megatron_accepts_the_versions_of_transformer_engine() -> None:
    wanted = TRANSFORMER_ENGINE["one"]
    [theirs] = [
        found.specifier
        for text in requires("megatron-core") or []
        if (found := Requirement(text)).name == "transformer-engine" and found.specifier
    ]
    for version in ("2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0"):
        assert (version in SpecifierSet(wanted)) == (version in theirs), version


def test_the_kernels_of_sglang_are_for_the_cuda_that_is_installed() -> None:
    [cuda] = re.findall(r"^CUDA=(\d+)", SCRIPT.read_text(), re.MULTILINE)
    kernels = [
        text for text in requires("sglang") or [] if text.startswith(("flashinfer_python[", "nvidia-cutlass-dsl["))
    ]
    assert kernels and all(f"[cu{cuda}]" in text for text in kernels)


def test_every_file_that_installs_a_set_names_its_versions() -> None:
    """The table at run time is the oracle. Files of both sets are alike except for packages that differ by set."""
    for name, text in SETS.items():
        wanted = {one.name: str(one.specifier) for one in map(Requirement, text.split())}
        pinned = pins(f"tools/constraints-{name}.txt")
        on_cpu = pins(f"grpo_mega/rollout/sglang/requirements-cpu-{name}.txt")
        assert SpecifierSet(TRANSFORMER_ENGINE[name]) == SpecifierSet(wanted["transformer-engine"])
        assert f"=={pinned['megatron-core']}" == wanted["megatron-core"]
        assert f"=={pinned['transformers']}" == f"=={on_cpu['transformers']}" == wanted["transformers"]
        assert "torch" not in pinned and "sglang" not in pinned, "builds for CPUs and GPUs differ"
        assert all(pinned.get(package, version) == version for package, version in on_cpu.items())
        head = (ROOT / f"grpo_mega/rollout/sglang/requirements-cpu-{name}.txt").read_text().splitlines()[1]
        assert f"sglang{wanted['sglang']} " in head and head.endswith(f"requirements-cpu-{name}.txt")
    one, two = (pins(f"tools/constraints-{name}.txt") for name in SETS)
    assert list(one) == list(two)
    assert {name for name in one if one[name] != two[name]} == {"megatron-core", "openai", "tokenizers", "transformers"}


def pins(path: str) -> dict[str, str]:
    """Return the pinned versions in a file of requirements."""
    lines = [line for line in (ROOT / path).read_text().splitlines() if "==" in line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_extra_alone_builds_no_extension() -> None:
    """pip would compile it in an isolated environment against another torch."""
    assert not any("transformer" in text.partition("#")[0] for text in PROJECT["optional-dependencies"]["gpu"])


def test_another_option_is_refused_before_anything_is_installed() -> None:
    result = subprocess.run(["bash", str(SCRIPT), "--cpu"], capture_output=True, text=True)
    assert result.returncode == 1 and "error: --cpu " in result.stderr and result.stderr.count("\n") == 1


def install(
    folder: Path, *, release: str = "13.0", driver: str = "580.65.06", glibc: str = "2.36", headers: str = "cudnn nccl"
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a copy of the script where nvcc, nvidia-smi and Python are fakes. Return the calls of pip, with CPATH."""
    for name in ("tools/install_gpu.sh", "tools/constraints-one.txt", "examples/env.sh", "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for package in headers.split():
        (folder / "site" / "nvidia" / package / "include").mkdir(parents=True)
        (folder / "site" / "nvidia" / package / "include" / f"{package}.h").touch()
    calls = folder / "calls"
    fakes = {
        "bin/nvcc": f"echo 'Cuda compilation tools, release {release}, V{release}.48'",
        "bin/nvidia-smi": f"echo {driver}",
        "bin/getconf": f"echo glibc {glibc}",
        ".venv/bin/python": f"""case "$*" in
            *torch.version.cuda*) echo 13.0 ;;
            *version_info*) echo 3.11 ;;
            *sysconfig*) echo {folder}/site ;;
            *pip*) echo "$CPATH $*" >> {calls} ;;
        esac""",
    }
    for name, text in fakes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "CUDA_HOME": str(folder)}
    result = subprocess.run(
        ["bash", str(folder / "tools" / "install_gpu.sh")], env=environment, capture_output=True, text=True
    )
    return result, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"release": "12.8"}, "bin/nvcc is of CUDA 12.8: must be of CUDA 13; load that module, or set CUDA_HOME"),
        ({"glibc": "2.31"}, "glibc 2.31: must be 2.34 or later for SGLang's wheels"),
        ({"driver": "570.86.10"}, "driver 570.86.10: must be 580 or later for CUDA 13; update the driver"),
    ],
)
def test_toolkit_and_driver_are_checked_before_any_download(
    machine: dict[str, str], words: str, tmp_path: Path
) -> None:
    result, calls = install(tmp_path, **machine)
    assert result.returncode == 1 and calls == [], result
    [line] = result.stderr.splitlines()
    assert words in line


def test_the_extension_is_compiled_with_the_headers_of_pips_cudnn(tmp_path: Path) -> None:
    """A toolkit has no cudnn.h, and Transformer Engine's build looks nowhere else (its issues 918, 1309, 1506)."""
    result, calls = install(tmp_path)
    assert result.returncode == 0, result.stderr
    [built] = [call for call in calls if "--no-build-isolation" in call]
    paths = built.partition(" ")[0].split(":")
    assert (Path(paths[0]) / "cudnn.h").is_file() and (Path(paths[1]) / "nccl.h").is_file()
    assert "transformer-engine[core_cu13,pytorch]" in built and "torch==" in calls[0]


def test_missing_headers_are_reported_before_the_compilation(tmp_path: Path) -> None:
    result, calls = install(tmp_path, headers="nccl")
    assert result.returncode == 1 and "cudnn/include/cudnn.h" in result.stderr
    assert len(calls) == 1, calls


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
    else:
        assert "Not yet run" in text
