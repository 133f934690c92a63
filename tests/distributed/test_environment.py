"""The environment variables that a rank sets for libraries, for every way to start it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.distributed.environment import (
    ALLOCATOR,
    CORES_VARIABLE,
    LIBRARIES,
    addresses_of,
    bind_to_gpu_cores,
    cuda_compiler,
    interface_between_nodes,
    interface_to,
    library_environment,
    server_cache,
)

ROOT = Path(__file__).resolve().parents[2]


def test_values_of_the_user_are_kept() -> None:
    given = {"NCCL_DEBUG": "INFO", "NETWORK_INTERFACE": "ib0", "GLOO_SOCKET_IFNAME": "eth7"}
    added = library_environment(given)
    assert not added.keys() & given.keys()
    assert added == {name: value for name, value in LIBRARIES.items() if name != "NCCL_DEBUG"} | {
        "NCCL_SOCKET_IFNAME": "ib0"
    }


def test_transformer_engine_gets_the_cudnn_that_pip_installed_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    gpu = {"PATH": str(tmp_path)}
    (tmp_path / "nvidia/cudnn/lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert "CUDNN_HOME" not in library_environment(gpu)
    (tmp_path / "nvidia/cudnn/lib/libcudnn.so.9").touch()
    assert library_environment(gpu)["CUDNN_HOME"] == str(tmp_path / "nvidia/cudnn")
    assert "CUDNN_HOME" not in library_environment({}) | library_environment(gpu | {"CUDNN_HOME": "/mine"})


def test_deterministic_kernels_are_added_on_request() -> None:
    added = library_environment({"DETERMINISTIC": "1"})
    assert added["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0" and added["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "NCCL_ALGO" not in library_environment({"DETERMINISTIC": "0"})


def test_the_trainers_allocator_expands_segments_on_a_gpu_only(tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    gpu = {"PATH": str(tmp_path)}
    assert library_environment(gpu)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert not ALLOCATOR & library_environment(gpu | {"CUDA_VISIBLE_DEVICES": ""}).keys()
    for name in ALLOCATOR:
        assert not ALLOCATOR & library_environment(gpu | {name: "backend:native"}).keys()


def test_gloo_uses_the_interface_that_leads_to_the_master() -> None:
    """This includes the master itself, although its route to its address uses the loopback."""
    assert library_environment({"MASTER_ADDR": "127.0.0.1"})["GLOO_SOCKET_IFNAME"] == "lo"
    own = [(name, address) for _, name in socket.if_nameindex() for address in addresses_of(name) if "." in address]
    for name, address in own:
        assert interface_to(address) == name
    assert interface_to("no-such-host.invalid") is None


def resolve_as(monkeypatch: pytest.MonkeyPatch, **addresses: list[str]) -> None:
    """Resolve these names as an /etc/hosts would."""
    real = socket.getaddrinfo

    def resolve(host: str, *arguments: Any, **options: Any) -> list[Any]:
        return [row for address in addresses.get(host, [host]) for row in real(address, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.parametrize("own", [["127.0.1.1"], ["127.0.1.1", "127.0.0.1", "::1"], []])
def test_nodes_never_meet_at_a_loopback_whatever_the_name_resolves_to(
    own: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve_as(monkeypatch, first=own)
    added = library_environment({"MASTER_ADDR": "first", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    warned = "set NETWORK_INTERFACE" in capsys.readouterr().err
    assert added.get("GLOO_SOCKET_IFNAME", "") != "lo" and warned == ("GLOO_SOCKET_IFNAME" not in added)


def test_an_address_after_the_loopback_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [(n, a) for _, n in socket.if_nameindex() for a in addresses_of(n) if "." in a and n != "lo"]
    if not own:
        pytest.skip("this machine has no network")
    name, address = own[-1]
    resolve_as(monkeypatch, first=["127.0.1.1", address])
    assert interface_between_nodes("first") == name


def test_every_command_that_trains_sets_them_before_its_rank_starts(tmp_path: Path) -> None:
    """The training process sets them, so torchrun, Slurm and grpo-mega's launcher need no separate table."""
    code = (
        "import os, pathlib; from grpo_mega.config import load; from grpo_mega.cli.commands.train import rank_imports; "
        f"rank_imports(load(pathlib.Path('{ROOT}/examples/quickstart.yaml'))).__enter__(); "
        "print(os.environ['NCCL_NVLS_ENABLE'], os.environ['NCCL_DEBUG'])"
    )
    environment = os.environ | {"NCCL_DEBUG": "INFO", "PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.split()[-2:] == ["0", "INFO"]


def test_the_cache_of_servers_is_on_the_node_and_only_for_this_user(tmp_path: Path) -> None:
    folder = server_cache({"NODE_LOCAL": str(tmp_path)})
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert server_cache({"NODE_LOCAL": str(tmp_path)}) == folder
    folder.chmod(0o777)  # another user may have put a library there
    other = server_cache({"NODE_LOCAL": str(tmp_path)})
    assert other != folder and other.stat().st_mode & 0o777 == 0o700
    other.rmdir()
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    other = server_cache({"NODE_LOCAL": str(tmp_path)})
    assert not other.is_symlink()
    other.rmdir()


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_the_compiler_is_searched_where_sglang_searches_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "nvcc"
    assert cuda_compiler({name: str(tmp_path), "PATH": "/usr/bin"}) is None
    compiler.write_text("#!/bin/sh\n")
    assert cuda_compiler({name: str(tmp_path), "PATH": "/usr/bin"}) is None, "the file is not executable"
    compiler.chmod(0o755)
    assert cuda_compiler({name: str(tmp_path), "PATH": "/usr/bin"}) == compiler
    assert cuda_compiler({"PATH": f"/usr/bin:{tmp_path}/bin"}) == compiler
    assert cuda_compiler({"CUDA_HOME": str(tmp_path / "other"), "PATH": f"{tmp_path}/bin"}) is None, (
        "CUDA_HOME comes first"
    )


def test_imports_of_a_rank_are_exempt_from_garbage_collection() -> None:
    code = (
        "import gc, pathlib; from grpo_mega.config import load; from grpo_mega.cli.commands.train import rank_imports\n"
        f"config = load(pathlib.Path('{ROOT}/examples/quickstart.yaml'))\n"
        "before = gc.get_freeze_count()\n"
        "with rank_imports(config):\n    assert not gc.isenabled(); import asyncio\n"
        "assert gc.isenabled() and gc.get_freeze_count() > before + 1000, gc.get_freeze_count()\n"
        "try:\n    with rank_imports(config): import no_such_module\n"
        "except ImportError: assert gc.isenabled()\nelse: raise AssertionError"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


@pytest.mark.parametrize(
    ("local_rank", "visible", "expected"),
    [
        ("0", None, {0}),
        ("1", None, {1}),
        ("0", "1", {1}),
        ("0", "GPU-b1,0", {1}),
        ("2", None, {0, 1}),  # the cores of its node are not of this process
        ("5", None, {0, 1}),  # there is no such GPU
        ("0", "", {0, 1}),  # the GPUs are hidden
    ],
)
def test_a_rank_uses_the_cores_of_its_gpus_numa_node(
    local_rank: str, visible: str | None, expected: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    cards = ["0, GPU-a0, 00000000:1A:00.0", "1, GPU-b1, 00000000:9B:00.0", "2, GPU-c2, 00000000:DB:00.0"]
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{card}'\n" for card in cards))
    smi.chmod(0o755)
    for bus_id, cores in (("1a", "0,4-6\n"), ("9b", "1-3,7\n"), ("db", "64-127\n")):
        folder = tmp_path / "bus" / "pci" / "devices" / f"0000:{bus_id}:00.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(cores)
    monkeypatch.setenv("PATH", f"{smi.parent}{os.pathsep}{os.environ['PATH']}")
    chosen = [{0, 1}]
    monkeypatch.setenv(CORES_VARIABLE, "")  # so that the earlier value returns after the test
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: chosen[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: chosen.append(cores))
    environ = {"PATH": os.environ["PATH"], "LOCAL_RANK": local_rank}
    bind_to_gpu_cores(environ | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}), tmp_path)
    assert chosen[-1] == expected
