"""Two nodes, as network namespaces, whose own names resolve to 127.0.1.1 as on Debian and Ubuntu, train together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_mega.paths import METRICS_FILE
from tools.benchmarks.kills import write_inputs

ROOT = Path(__file__).resolve().parents[2]
PORT = 29000
# As root in the node's namespaces: its own name, and its own /etc/hosts.
IN_NODE = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'

pytestmark = pytest.mark.distributed


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def spaces(tmp_path: Path) -> Iterator[list[str]]:
    """Return two connected network namespaces, 10.99.7.1 and 10.99.7.2. Each has a hosts file in tmp_path."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the program ip (Debian package iproute2)")
    names = [f"grpo-{os.getpid()}-{node}" for node in (0, 1)]
    links = [f"g{os.getpid()}n{node}" for node in (0, 1)]
    with ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this container may not create network namespaces ({error.stderr.strip()})")
            stack.callback(ip, "netns", "delete", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for node, (name, link) in enumerate(zip(names, links, strict=True)):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "address", "add", f"10.99.7.{node + 1}/24", "dev", link)
            for device in ("lo", link):
                ip("-n", name, "link", "set", device, "up")
            own, other = ("127.0.1.1", "10.99.7.2") if node == 0 else ("10.99.7.1", "127.0.1.1")
            (tmp_path / f"hosts{node}").write_text(f"127.0.0.1 localhost\n{own} node0\n{other} node1\n")
        yield names


def enter(space: str, node: int, tmp_path: Path) -> list[str]:
    """Return the start of a command line that runs the rest in a node."""
    start = ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "sh", "-c", IN_NODE, "sh"]
    return [*start, f"node{node}", str(tmp_path / f"hosts{node}"), sys.executable]


def test_gloo_uses_the_link_between_the_nodes(spaces: list[str], tmp_path: Path) -> None:
    code = "import os; from grpo_mega.distributed.environment import *; print(library_environment(os.environ))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "node0"}
    environment |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for node, space in enumerate(spaces):
        found = subprocess.check_output([*enter(space, node, tmp_path), "-c", code], env=environment, text=True)
        assert f"'GLOO_SOCKET_IFNAME': 'g{os.getpid()}n{node}'" in found


@pytest.mark.full
@pytest.mark.parametrize("module", ["torch.distributed.run", "grpo_mega.distributed.rendezvous"])
def test_nodes_whose_own_name_is_a_loopback_address_train(spaces: list[str], tmp_path: Path, module: str) -> None:
    config = write_inputs(tmp_path, "dp=2")
    settings = {"steps": 2, "eval.interval": 0, "checkpoint.interval": 0, "run_dir": tmp_path / "run"}
    command = ["-m", "grpo_mega.cli", "train", str(config)]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    # Without the variables of this machine's ranks, so that each node decides by itself.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO", "NCCL", "MASTER"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GRPO_MEGA_RUN_KEY": "0f" * 32}
    nodes = []
    for node, space in enumerate(spaces):
        start = [*enter(space, node, tmp_path), "-m", module, "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
        start += ["--master-addr=node0", f"--master-port={PORT}", *command]
        log = (tmp_path / f"node{node}.log").open("w")
        nodes.append(subprocess.Popen(start, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT))
    try:
        codes = [node.wait(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    printed = "\n".join((tmp_path / f"node{node}.log").read_text() for node in (0, 1))
    assert codes == [0, 0], printed
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()][-1] == 2
