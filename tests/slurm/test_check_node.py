"""tools/check_node.py on output of nvidia-smi and on this machine; tools/check_allreduce.py on three nodes of one
rank.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check_allreduce
import check_node
import pytest

from grpo_mega.distributed.launch import free_port

ROOT = Path(__file__).resolve().parents[2]
GPUS = """0, NVIDIA H100 80GB HBM3, 550.54.15, 0, Not Active, Not Active, Not Active, 1980, 4
1, NVIDIA H100 80GB HBM3, 550.54.15, 0, Not Active, Not Active, Not Active, 1980, 4
"""
ROWS = """GPU-5e1c9a2e-0a44-6c1b-9d4a-0c6f3f6d1a10, 0, 0
GPU-7b7cf0c1-8a0e-9b0a-2a0f-4f6f8f1e2b21, 0, 0
"""
LINKS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5e1c9a2e-0a44-6c1b-9d4a-0c6f3f6d1a10)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-7b7cf0c1-8a0e-9b0a-2a0f-4f6f8f1e2b21)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""


def gpu_problems(text: str, num_expected: int = 2) -> list[str]:
    return check_node.gpu_problems(check_node.parse_csv(text, check_node.FIELDS), num_expected)


def test_sound_gpus_have_no_problems() -> None:
    assert gpu_problems(GPUS) == []
    assert check_node.row_problems(check_node.parse_csv(ROWS, check_node.ROW_FIELDS)) == []
    assert check_node.link_problems(check_node.parse_links(LINKS), 2) == []


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("550.54.15, 0,", "550.54.15, 3,", "GPU 0 has 3 uncorrected memory errors"),
        (
            "Not Active, Not Active, Not Active, 1980, 4",
            "Active, Active, Not Active, 1980, 4",
            "GPU 0 is slowed down (hw_slowdown,",
        ),
        ("1980, 4", "1755, 4", "GPU 0 runs at up to 1755 MHz, others at 1980"),
        ("1980, 4", "1980, 70123", "70123 MiB of GPU 0 are in use by someone else"),
        ("H100 80GB HBM3", "H100 PCIe", "its GPUs differ: NVIDIA H100 80GB HBM3, NVIDIA H100 PCIe"),
    ],
)
def test_problems_of_a_gpu_are_reported(before: str, after: str, problem: str) -> None:
    [found] = gpu_problems(GPUS.replace(before, after, 1))
    assert found.startswith(problem)


def test_a_library_that_keeps_processes_from_starting_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that needs one that is not there ends every process that preloads it, so both are built here."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch_memory_saver").mkdir()
    (tmp_path / "torch_memory_saver/__init__.py").touch()
    assert "has no torch_memory_saver_hook_mode_preload_cu99*.so" in check_node.preload_problems("99.0")[0]
    runtime = tmp_path / "nvidia/cu99/lib/libcudart.so.99"
    runtime.parent.mkdir(parents=True)
    saver = tmp_path / "torch_memory_saver_hook_mode_preload_cu99.abi3.so"
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "empty.c").touch()
    build = [compiler, "-shared", "-fPIC", str(tmp_path / "empty.c"), "-o"]
    subprocess.run([*build, str(runtime), "-Wl,-soname,libcudart.so.99"], check=True)
    subprocess.run([*build, str(saver), "-Wl,--no-as-needed", str(runtime)], check=True)
    assert check_node.preload_problems("99.0") == [], "found in the folder of pip's package"
    assert check_node.preload_problems(None) == []
    runtime.unlink()
    (problem,) = check_node.preload_problems("99.0")
    assert str(saver) in problem and "libcudart.so.99" in problem


@pytest.mark.parametrize(("cuda", "is_too_old"), [("13.0", True), ("12.9", False), (None, False), ("99.1", False)])
def test_a_driver_too_old_for_the_cuda_of_torch_is_a_problem(cuda: str | None, is_too_old: bool) -> None:
    gpus = check_node.parse_csv(GPUS, check_node.FIELDS)
    expected = ["driver 550.54.15 is too old for torch's CUDA 13.0, which needs 580 or later"] if is_too_old else []
    assert check_node.driver_problems(gpus, cuda) == expected


def test_the_cuda_version_of_torch_is_read_without_importing_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    assert check_node.torch_cuda() == torch.version.cuda
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(
        "debug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    )
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check_node.torch_cuda() == "13.0"


def test_a_missing_compiler_is_a_problem_if_sglang_will_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    [problem] = check_node.compiler_problems("13.0")
    assert problem.startswith("nvcc is missing; SGLang compiles kernels")
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    nvcc.chmod(0o755)
    assert check_node.compiler_problems("12.9") == [] == check_node.compiler_problems(None)
    assert check_node.compiler_problems("13.0") == [
        f"{nvcc} is of CUDA 12.8, but torch has CUDA 13.0; set CUDA_HOME to a toolkit of torch's version"
    ]
    nvcc.write_text("#!/bin/sh\nexit 3\n")
    assert check_node.compiler_problems("13.0")[0].startswith("nvcc fails")


def test_a_driver_that_renamed_a_field_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\ncase $1 in *throttle*) exit 2 ;; esac\ncat << END\n{GPUS}END\n")
    smi.chmod(0o755)
    assert [gpu["index"] for gpu in check_node.parse_csv(check_node.query_gpus(), check_node.FIELDS)] == ["0", "1"]


def test_missing_gpus_and_fields_without_a_value_are_detected() -> None:
    assert gpu_problems(GPUS, 8) == ["2 GPUs instead of 8"]
    assert gpu_problems(GPUS.replace(" 0, Not", " [N/A], Not")) == []


def test_broken_rows_and_links_are_reported() -> None:
    rows = check_node.parse_csv(
        ROWS.replace("1a10, 0, 0", "1a10, 1, 0").replace("2b21, 0, 0", "2b21, 0, 1"), check_node.ROW_FIELDS
    )
    pending, failed = check_node.row_problems(rows)
    assert pending.endswith("1a10 has memory rows that wait for a reset to be remapped")
    assert failed.endswith("2b21 has memory rows that could not be remapped")
    down = LINKS.replace("Link 1: 26.562 GB/s", "Link 1: <inactive>", 1)
    assert check_node.link_problems(check_node.parse_links(down), 2) == ["GPU 0: NVLink 1 down"]
    fewer = check_node.parse_links(LINKS.removesuffix("\t Link 1: 26.562 GB/s\n"))
    assert check_node.link_problems(fewer, 2) == ["GPU 1 has 1 NVLinks, others 2"]


def test_nodes_that_failed_or_are_silent_or_differ_are_named(tmp_path: Path) -> None:
    good, other = '{"torch": "2.13.0"}', '{"torch": "2.12.0"}'
    for node, fingerprint, problems in (
        ("n0", good, ""),
        ("n1", other, ""),
        ("n2", good, ""),
        ("n3", good, '"GPU 0 is gone"'),
    ):
        (tmp_path / f"{node}.json").write_text(f'{{"problems": [{problems}], "fingerprint": {fingerprint}}}')
    command = [sys.executable, str(ROOT / "tools" / "check_node.py"), "--compare", str(tmp_path)]
    result = subprocess.run([*command, "n0", "n1", "n2", "n3", "n4"], capture_output=True, text=True)
    assert result.returncode == 1 and sorted(result.stdout.split()) == ["n1", "n3", "n4"]
    assert "node n1: torch 2.12.0 (others: 2.13.0)" in result.stderr
    assert "node n3: GPU 0 is gone" in result.stderr and "node n4: the check did not end" in result.stderr
    result = subprocess.run([*command, "n0", "n2"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_nodes_that_load_other_libraries_or_have_other_variables_are_named(tmp_path: Path) -> None:
    """Each node has a torch that loads a library with a version. On n3 it loads two."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    versions = {"n0": [91400], "n1": [91400], "n2": [91002], "n3": [91400, 91002], "n4": [91400], "n5": [91400]}
    for node, found in versions.items():
        torch = tmp_path / node / "torch"
        (tmp_path / node / "torch-9.dist-info").mkdir(parents=True)
        (tmp_path / node / "torch-9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9\n")
        for number, version in enumerate(found):
            library = torch / f"lib {number}" / "libcudnn.so.9"
            library.parent.mkdir(parents=True)
            (torch / "a.c").write_text(f"long cudnnGetVersion(void) {{ return {version}; }}")
            subprocess.run([compiler, "-shared", "-fPIC", str(torch / "a.c"), "-o", str(library)], check=True)
        (torch / "version.py").write_text("cuda: str = '13.0'\n")
        loads = "[ctypes.CDLL(str(path)) for path in sorted(pathlib.Path(__file__).parent.glob('*/*.so.9'))]"
        (torch / "__init__.py").write_text(f"import ctypes, pathlib\n{loads}\n" if node != "n5" else "1 / 0")
        environment = {"PYTHONPATH": str(tmp_path / node), "SLURMD_NODENAME": node, "PATH": os.environ["PATH"]}
        environment |= {"NVTE_FUSED_ATTN": "0"} if node == "n4" else {}
        command = [sys.executable, str(ROOT / "tools" / "check_node.py"), "--out", str(tmp_path)]
        subprocess.run(command, env=environment, capture_output=True)
    command = [sys.executable, str(ROOT / "tools" / "check_node.py"), "--compare", str(tmp_path), *versions]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.split() == ["n2", "n3", "n4", "n5"], result
    lines = result.stderr.splitlines()
    assert lines[0] == "node n2: cudnn torch/lib 0/libcudnn.so.9 91002 (others: 91400)"
    assert lines[1].startswith(
        "node n3: cudnn: two versions are loaded, cudnn torch/lib 0/libcudnn.so.9=91400 and cudnn"
    )
    assert lines[2] == "node n4: NVTE_FUSED_ATTN 0 (others: none)"
    assert lines[3].startswith("node n5: ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("problems", "blamed"),
    [
        ({"n0": ["/d/n0: 1.5 GB free"], "n1": ["/d/n1: 22 GB free", "GPU 3 is gone"]}, None),
        ({"n0": ["nvcc is missing"], "n1": ["nvcc is missing"], "n2": ["nvcc is missing"]}, None),
        ({"n0": None, "n1": None}, None),
        ({"n0": None}, None),
        ({"n0": ["nvcc is missing"], "n1": []}, ["n0"]),
        ({"n0": ["nvcc is missing"], "n1": None}, ["n0", "n1"]),
        ({"n0": ["nvcc is missing"]}, ["n0"]),
    ],
    ids=str,
)
def test_a_problem_that_all_nodes_have_blames_none(
    problems: dict[str, list[str] | None], blamed: list[str] | None, tmp_path: Path
) -> None:
    for node, found in problems.items():
        if found is not None:  # otherwise the check did not end
            (tmp_path / f"{node}.json").write_text(json.dumps({"problems": found, "fingerprint": {"torch": "2"}}))
    command = [sys.executable, str(ROOT / "tools" / "check_node.py"), "--compare", str(tmp_path), *problems]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, sorted(result.stdout.split())) == (1 if blamed else 2, blamed or []), result
    assert ("no node is to blame" in result.stderr) == (blamed is None)


def test_the_check_of_this_machine_names_missing_parts(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "check_node.py"), "--disks", f"{tmp_path}:0.001 {tmp_path}/%n:1"]
    result = subprocess.run(command, env=os.environ | {"SLURMD_NODENAME": "n7"}, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, f"node n7: {tmp_path}/n7: No such file or directory\n")
    assert subprocess.run([*command[:-1], f"{tmp_path}:0.001"], capture_output=True).returncode == 0


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("floor", [pytest.param(0.0, marks=pytest.mark.sweep), 1e6])
def test_a_network_that_is_slow_everywhere_blames_no_node(floor: float, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "tools" / "check_allreduce.py"),
        "--ranks",
        "1",
        "--network-floor",
        str(floor),
    ]
    command += ["--out", str(tmp_path / "slow")]
    shared = {"SLURM_NNODES": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(command, env=os.environ | shared | {"SLURM_NODEID": str(i), "SLURMD_NODENAME": f"n{i}"})
        for i in range(3)
    ]
    codes = [node.wait(timeout=300) for node in nodes]
    assert set(codes) == {int(floor > 0)}
    assert not (tmp_path / "slow").exists()
    if floor:
        blamed = (tmp_path / "floor").read_text()
        assert blamed.startswith(
            "3 of 3 nodes are below the floor, so no node is to blame: all-reduce within nodes 0.0 to 0.0"
        )
        assert re.search(r"between neighbours [\d.]+ to [\d.]+ GB/s \(floor 1e\+06\); set ALLREDUCE_FLOOR_GBPS", blamed)
    else:
        assert not (tmp_path / "floor").exists()


def test_a_node_is_slow_only_if_both_neighbors_are_slow_with_it() -> None:
    code = "from check_allreduce import slow_nodes; print(sorted(slow_nodes([9, 9, 1, 9], [5, 5, 1, 1], 2, 2)))"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        command, cwd=ROOT / "tools", env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed == "[2, 3]\n"  # 2 is slow within itself; pairs 2-3 and 3-0 are slow


@pytest.mark.parametrize(("num_slow", "num_nodes"), [(2, 2), (2, 3), (3, 8), (17, 64)])
def test_the_floor_is_blamed_if_over_one_node_and_over_a_quarter_are_slow(num_slow: int, num_nodes: int) -> None:
    assert check_allreduce.is_floor_to_blame(num_slow, num_nodes)
    assert not check_allreduce.is_floor_to_blame(num_slow - 1, num_nodes)
