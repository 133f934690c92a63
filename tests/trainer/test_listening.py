"""No process of a single-machine run listens on an address that other machines can reach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.distributed.launch import free_port
from tests.helpers.sockets import is_loopback, listening, listening_of_tree
from tools.benchmarks import kills

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 600.0
SHORT = ["--set", "steps=1", "--set", "checkpoint.interval=1", "--set", "eval.interval=0"]


def watched(arguments: list[str], folder: Path, **environment: str) -> set[tuple[str, int]]:
    """Run a module to its end. Return the addresses on which its processes listened."""
    values = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    log = folder / "output"
    with log.open("a") as output:
        command = [sys.executable, "-m", *arguments]
        process = subprocess.Popen(command, cwd=folder, env=values, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            found = listening_of_tree(process, SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, log.read_text()
    return found


def assert_closed(found: set[tuple[str, int]], at_least: int) -> None:
    assert len(found) >= at_least, f"too few for a run: {found}"
    assert not [place for place in found if not is_loopback(place[0])], found


def test_the_reader_of_sockets_sees_open_addresses() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as closed,
        socket.create_server(("", 0)) as opened,
        socket.create_server(("::", 0), family=socket.AF_INET6) as opened_6,
    ):
        wanted = {one.getsockname()[:2] for one in (closed, opened, opened_6)}
        assert wanted <= listening([os.getpid()])
    assert {address for address, _ in wanted if not is_loopback(address)} == {"0.0.0.0", "::"}


@pytest.mark.full
@pytest.mark.parametrize(("layout", "at_least"), [pytest.param("tp=1", 1, marks=pytest.mark.sweep), ("dp=2", 3)])
def test_training_evaluation_and_check_listen_only_on_the_loopback(layout: str, at_least: int, tmp_path: Path) -> None:
    config = kills.write_inputs(tmp_path, layout)
    run = ["--set", f"run_dir={tmp_path / 'run'}"]
    assert_closed(watched(["grpo_mega.cli", "train", str(config), *run, *SHORT], tmp_path), at_least)
    assert_closed(watched(["grpo_mega.cli", "eval", str(tmp_path / "run")], tmp_path), at_least)
    if layout != "tp=1":
        check = ["check", str(config), "--set", "run_dir=unused", "--layouts", layout]
        assert_closed(watched(["grpo_mega.cli", *check], tmp_path), at_least)


@pytest.mark.full
def test_ranks_of_a_slurm_job_listen_only_on_the_rendezvous_address(tmp_path: Path) -> None:
    """Two nodes. The first node has a loopback address here."""
    config, port = kills.write_inputs(tmp_path, "dp=2"), str(free_port())
    agent = ["grpo_mega.distributed.rendezvous", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    train = ["-m", "grpo_mega.cli", "train", str(config), "--set", f"run_dir={tmp_path / 'run'}", *SHORT]
    command = [sys.executable, "-m", *agent, "--node-rank=1", f"--master-port={port}", *train]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "second").open("w") as output:
        second = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            found = watched([*agent, "--node-rank=0", f"--master-port={port}", *train], tmp_path)
        finally:
            second.kill()
    assert_closed(found, 2)
    assert ("127.0.0.1", int(port)) in found
    assert not (tmp_path / "run" / "run_key").exists()


@pytest.mark.sglang
@pytest.mark.full
def test_servers_of_a_run_listen_only_on_the_loopback(tmp_path: Path) -> None:
    config = kills.write_inputs(tmp_path, "dp=2", {"engine": "sglang", "tp": 2})
    found = watched(["grpo_mega.cli", "train", str(config), "--set", f"run_dir={tmp_path / 'run'}", *SHORT], tmp_path)
    assert_closed(found, 7)  # the job's store, the engine's, the server's HTTP, and gloo of four processes
