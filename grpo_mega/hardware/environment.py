"""The variables that libraries read in a rank: one table, whether grpo-mega train, torchrun or Slurm started it.

CUDA, NCCL and gloo read them when they are first used, so a rank sets them before that. What the user has set stays.
Never imports torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

from grpo_mega.hardware.driver import gpu_sign
from grpo_mega.temporary import shared_folder

LIBRARIES = {
    # Tensor parallelism with sequence parallelism overlaps communication with GEMMs only if kernels start in the order in which
    # they were launched, which one hardware queue guarantees.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Engine and trainer take turns on a GPU's memory. Buffers that NCCL maps through cuMem, and those of NVLink SHARP, which
    # need it, stay allocated while their owner sleeps: some GB that the other one lacks.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    # A rank that is gone must end the others, not leave them waiting.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # 2^22 * 4 us before InfiniBand gives a packet up: links flap for a second or two when a port is retrained.
    "NCCL_IB_TIMEOUT": "22",
    "TOKENIZERS_PARALLELISM": "false",
}
# The same bits in every run, 10-20% slower: no attention kernel that adds atomically, one reduction order for NCCL, and a fixed
# workspace, on which cuBLAS' choice of kernel depends.
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
SIOCGIFADDR = 0x8915  # the ioctl that returns an interface's IPv4 address


def library_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank with the environment `environ` adds to it; none of them is there yet.

    DETERMINISTIC=1 adds those of deterministic kernels. NETWORK_INTERFACE names the interface of NCCL's and gloo's sockets;
    without it gloo takes the one that leads to MASTER_ADDR. Its own choice is the address of the host's name, which on Ubuntu
    is 127.0.1.1, so that ranks of different nodes never meet. On one machine both take the loopback, which no other machine
    reaches.
    """
    values = dict(LIBRARIES)
    if environ.get("DETERMINISTIC") == "1":
        values |= DETERMINISTIC
    if interface := environ.get("NETWORK_INTERFACE"):
        values |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    elif is_one_machine(environ):
        values |= loopback_sockets()
    elif interface := interface_to(environ.get("MASTER_ADDR", "")):
        values["GLOO_SOCKET_IFNAME"] = interface
    if gpu_sign(environ):  # what torch compiles is for later runs too; its default lies in TMPDIR, which ends with the rank
        values["TORCHINDUCTOR_CACHE_DIR"] = str(shared_folder() / f"torchinductor_{os.getuid()}")
    return {name: value for name, value in values.items() if name not in environ}


def is_one_machine(environ: Mapping[str, str]) -> bool:
    """Return True if all ranks of the job are on this machine, as far as the launcher's variables say."""
    return environ.get("WORLD_SIZE") is not None and environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE")


def loopback_sockets() -> dict[str, str]:
    """Return the variables by which the sockets of NCCL and gloo use the loopback interface."""
    interface = interface_to("127.0.0.1")
    return {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}


def interface_to(host: str) -> str | None:
    """Return the network interface from whose address this machine reaches `host`; None where it finds none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses the route; a datagram socket sends nothing for it
            source = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex() if source in addresses_of(name)]
    return names[0] if names else None


def addresses_of(interface: str) -> list[str]:
    """Return the first IPv4 address and all IPv6 addresses of an interface."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError:  # it has none
            pass
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:  # a kernel without IPv6
        rows = []
    return found + [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[-1] == interface]


def server_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of this node in which SGLang keeps the kernels that it compiles, made if need be.

    SGLang's default lies in the home, which nodes often share: the servers of all nodes would wait for one lock.
    Others of the node may write to the folder above, so a folder that is not this user's own is passed by.
    """
    parent = Path(environ.get("NODE_LOCAL") or shared_folder())
    folder = parent / f"grpo_mega-sglang-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="grpo_mega-sglang-"))


def cuda_compiler(environ: Mapping[str, str]) -> Path | None:
    """Return the nvcc with which SGLang compiles kernels when it runs; None where it would find none."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    found = shutil.which("nvcc", path=f"{home}/bin" if home else f"{environ.get('PATH', '')}{os.pathsep}/usr/local/cuda/bin")
    return Path(found) if found else None
