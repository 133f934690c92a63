"""Loaded CUDA libraries, from texts of /proc/PID/maps and from libraries that a compiler builds here, and variables
that change numbers.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.distributed.libraries import read_libraries
from tests.helpers.ranks import ROOT

HEAD = "7f2a1c000000-7f2a1c1b5000 r-xp 00012000 fd:01 1234567"
FILES = {
    "/opt/my env (old)/lib/libcudnn.so.9": "cudnn",
    "/usr/lib/x86_64-linux-gnu/libnccl.so.2.27.5": "nccl",
    "/a  b/libcublas.so.12 (deleted)": "cublas",
    "/a  b/libcublasLt.so.12": "cublasLt",
    "/w/torch/lib/libcudart-d0da41ae.so.11.0": "cudart",
    "/söme/libcudart.so.13": "cudart",
}
OTHERS = [
    "",
    "[heap]",
    "[anon: libcudnn.so.9]",
    "/usr/lib/libnccl-net-ofi.so",
    "/usr/lib/libcudnn_ops.so.9",  # cuDNN compares the versions of its parts itself
    "/usr/lib/libcudnn.so.9.txt",
    "/usr/lib/notlibcudnn.so.9",
    "/usr/lib/libcudnn.so.9/other.so",
    "/dev/shm/libcudart_static.a",
]


def test_libraries_are_found_in_maps_with_odd_paths(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    lines = [f"{HEAD}                    {path}" for path in (*FILES, *OTHERS, *FILES)]
    maps.write_bytes("\n".join([*lines, "7ffd0000-7ffd1000 rw-p 00000000 00:00 0 ", ""]).encode() + b"\xff/x.so\n")
    assert read_libraries(maps) == {f"{name} {path}": "unknown" for path, name in FILES.items()}
    maps.write_text("")
    assert read_libraries(maps) == {}


def test_a_process_without_cuda_has_no_libraries() -> None:
    import torch

    if torch.version.cuda is None:
        assert read_libraries() == {}


def build(folder: Path, version: int, name: str = "cudnn") -> Path:
    """Build a library that reports a version as the real one does."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder.mkdir(parents=True)
    source = {
        "cudnn": f"unsigned long cudnnGetVersion(void) {{ return {version}; }}",
        "nccl": f"int ncclGetVersion(int *found) {{ *found = {version}; return 0; }}",
        "cudart": f"int cudaRuntimeGetVersion(int *found) {{ *found = {version}; return 0; }}",
    }[name]
    (folder / "source.c").write_text(source)
    library = folder / f"lib{name}.so.9"
    command = [compiler, "-shared", "-fPIC", str(folder / "source.c"), "-o", str(library)]
    subprocess.run([*command, f"-Wl,-soname,lib{name}.so.9"], check=True)
    return library


def ask(code: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has only these variables."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    head = "import ctypes, json, os, sys\nfrom grpo_mega.distributed.libraries import *\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.run(command, env=kept | {"PYTHONPATH": str(ROOT)} | variables, capture_output=True, text=True)


LOAD = "for path in sys.argv[1:]: ctypes.CDLL(path)\n"


def test_two_versions_of_a_library_are_refused_and_named(tmp_path: Path) -> None:
    one, other = build(tmp_path / "of torch", 91400), build(tmp_path / "toolkit", 91002)
    same = build(tmp_path / "same", 91400)
    done = ask(f"{LOAD}print(json.dumps(read_libraries()))", one, same)
    assert json.loads(done.stdout) == {f"cudnn {one}": "91400", f"cudnn {same}": "91400"}, done.stderr
    done = ask(f"{LOAD}read_libraries()", one, other)
    (line,) = done.stderr.splitlines()[-1:]
    assert done.returncode == 1 and "ConfigError: cudnn: " in line
    assert f"{one}=91400 and cudnn {other}=91002; " in line and "LD_LIBRARY_PATH" in line


def test_a_replaced_file_and_a_second_cuda_runtime_are_named(tmp_path: Path) -> None:
    one, other = build(tmp_path / "a", 12090, "cudart"), build(tmp_path / "b", 13000, "cudart")
    nccl = build(tmp_path / "c", 22705, "nccl")
    done = ask(f"{LOAD}os.remove(sys.argv[3])\nprint(describe())", one, other, nccl)
    expected = f"cudart {one}=12090, cudart {other}=13000, nccl {nccl} (deleted)=unknown\n"
    assert done.stdout.endswith(f": {expected}") and done.stdout.count("\n") == 1, done.stderr


def test_variables_that_change_numbers_are_listed_and_others_are_not() -> None:
    change = {
        "NVTE_FLASH_ATTN": "0",
        "NVIDIA_TF32_OVERRIDE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "CUBLASLT_WORKSPACE_SIZE": "0",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",  # LOGPROB is not a log
        "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8": "1",  # SUPPORT is not a port
        "SGL_X": "2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "NCCL_ALGO": "Ring",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "FLASHINFER_Y": "a=/b",
        "DETERMINISTIC": "1",
    }
    others = {
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NCCL_ALGORITHM": "x",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_LOGS": "+dynamo",
        "CUBLASLT_LOG_LEVEL": "2",
        "SGLANG_PORT": "1",
        "SGLANG_API_KEY": "secret",
        "TRITON_CACHE_DIR": "/x",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "MKL_NUM_THREADS": "3",
        "MY_NVTE_FLASH_ATTN": "0",
    }
    done = ask("print(json.dumps(read_variables()))", **change, **others)
    assert json.loads(done.stdout) == change, done.stderr


def unknown(*folders: Path, **variables: str) -> set[str]:
    """Return the names that are marked as unknown with packages in these folders."""
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    done = ask("print(describe())", PYTHONPATH=path, **variables)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"(\w+)=\S* \(unknown, check the name\)", done.stdout))


def test_a_name_that_no_library_reads_is_marked(tmp_path: Path) -> None:
    variables = {"NVTE_FLASH_ATN": "0", "NVTE_FLASH_ATTN": "1", "CUBLAS_WORKSPACE": "7", "TORCH_ANY": "1"}
    assert unknown(**variables) == {"NVTE_FLASH_ATN", "CUBLAS_WORKSPACE"}
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "transformer_engine").mkdir()
    for package in ("sglang", "transformer_engine"):
        (tmp_path / package / "__init__.py").write_text("raise ImportError('it is read and not imported')")
    (tmp_path / "sglang" / "srt" / "environ.py").write_text('"é"; SGLANG_OF_THIS_VERSION = EnvBool(False)')
    (tmp_path / "sglang" / ".#lock.py").symlink_to("nowhere")  # an editor leaves such a link
    (tmp_path / "transformer_engine" / "new.py").write_text("os.getenv('NVTE_FLASH_ATN')")
    variables |= {"SGLANG_OF_THIS_VERSION": "1", "SGLANG_OF_THIS_VERSIO": "2", "SGLANG_OF_ANOTHER": "3"}
    assert unknown(tmp_path, **variables) == {"CUBLAS_WORKSPACE", "SGLANG_OF_THIS_VERSIO", "SGLANG_OF_ANOTHER"}


@pytest.mark.sglang
def test_the_names_of_the_installed_sglang_are_known() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "srt/environ.py").read_text())
    (fields,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Envs")
    targets = {node.targets[0].id for node in fields.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    names = {name for name in targets if name.startswith("SGLANG_")}
    misspelt = {f"{name}S" for name in names if name.endswith("LOGPROB")}
    assert len(names) > 500 and misspelt and unknown(**dict.fromkeys(names | misspelt, "1")) == misspelt


def test_the_names_of_transformer_engine_in_python_are_known() -> None:
    folders = [folder for folder in (ROOT / ".venv-te").glob("*") if (folder / "transformer_engine").exists()]
    for folder in folders:
        found = set()
        texts = [path.read_text() for path in (folder / "transformer_engine").rglob("*.py")]
        for text in (text for text in texts if "os.getenv" in text or "os.environ.get" in text):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get"):
                    found |= {ast.literal_eval(node.args[0])} if isinstance(node.args[0], ast.Constant) else set()
        names = {name for name in found if name.startswith("NVTE_")}
        assert "NVTE_UNFUSED_ATTN" in names and unknown(folder, **dict.fromkeys(names, "1")) == set()
    if not folders:
        pytest.skip("needs the packages of emulated kernels (tests/run.sh installs them)")
