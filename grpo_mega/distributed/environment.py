"""The variables that libraries read in a rank: one table for ranks of grpo-mega train, torchrun and Slurm. Never
imports torch.

CUDA, NCCL and gloo read them on first use, so a rank sets them before that. Variables that the user has set do not
change. `unusable_gpu_problems` detects a GPU that torch cannot use. Otherwise `device: auto` would silently train on
the CPU.
"""

import fcntl
import functools
import importlib.util
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from grpo_mega.processes import shared_folder

LIBRARIES = {
    # Tensor parallelism with sequence parallelism overlaps communication with GEMMs only if kernels start in launch
    # order. One hardware queue guarantees this order.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Engine and trainer take turns on a GPU's memory. Buffers that NCCL maps through cuMem stay allocated while their
    # owner sleeps, so the other one lacks some GB. Buffers of NVLink SHARP need cuMem and do the same.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    # Transformer Engine multiplies float32 matrices in TF32, with errors of 1e-3. A float32 run wants float32.
    "NVIDIA_TF32_OVERRIDE": "0",
    # If a rank is gone, the other ranks must end instead of waiting.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # InfiniBand gives up a packet after 2^22 * 4 us, because links flap for a second or two when a port is retrained.
    "NCCL_IB_TIMEOUT": "22",
    "TOKENIZERS_PARALLELISM": "false",
}
# Every run computes the same bits, 10-20% slower: no attention kernel with atomic additions, one reduction order for
# NCCL, and a fixed workspace for cuBLAS, because its choice of kernel depends on the workspace.
DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
NVIDIA, DISPLAYS = "0x10de", "0x03"  # vendor on the PCI bus; class of display and 3D controllers
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}  # variables of torch's allocator; torch reads the first
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that select the CPU
SECONDS_TO_ASK = 120.0
CORES_VARIABLE = "GRPO_MEGA_CORES"  # the cores of a rank before it was bound to some; its server uses all of them
_ASK = "import torch; print('torch sees a GPU:', torch.cuda.is_available())"
LOOPBACKS = ("127.0.0.1", "localhost", "::1")
_OUTSIDE = "192.0.2.1"  # an address for documentation (RFC 5737); only the default route leads to it
SIOCGIFADDR = 0x8915  # the ioctl that returns an interface's IPv4 address


def library_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank adds to its environment `environ`. Variables in `environ` are left out.

    DETERMINISTIC=1 adds the variables for deterministic kernels. NETWORK_INTERFACE is the interface for sockets of NCCL
    and gloo. Without it gloo uses the interface between the nodes. gloo's default is the address of the host's name,
    but on Debian and Ubuntu this is 127.0.1.1, so ranks of different nodes would never connect. On one machine both use
    the loopback interface, because no other machine can reach it.
    """
    values = dict(LIBRARIES)
    if environ.get("DETERMINISTIC") == "1":
        values |= DETERMINISTIC
    if interface := environ.get("NETWORK_INTERFACE"):
        values |= {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}
    elif is_one_machine(environ):
        values |= loopback_sockets()
    elif master := environ.get("MASTER_ADDR"):
        if interface := interface_between_nodes(master):
            values["GLOO_SOCKET_IFNAME"] = interface
        elif "GLOO_SOCKET_IFNAME" not in environ:
            print(
                f"grpo-mega: warning: no network interface of this node is known to reach other nodes"
                f" (MASTER_ADDR={master}), so gloo uses the address of the host's name; set NETWORK_INTERFACE",
                file=sys.stderr,
                flush=True,
            )
    if gpu_sign(
        environ
    ):  # keep compiled kernels for later runs; the default is in TMPDIR, which is removed with the rank
        # Rows of changing length, and storages that are freed and allocated in turn, leave gaps that no fixed segment
        # fills. The server does not inherit this, because its memory saver needs fixed segments.
        if not environ.keys() & ALLOCATOR:
            values["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        # Transformer Engine loads a cuDNN of the CUDA toolkit before torch's own. An older one breaks torch.
        if folder := cudnn_of_torch():
            values["CUDNN_HOME"] = str(folder)
        values["TORCHINDUCTOR_CACHE_DIR"] = str(shared_folder() / f"torchinductor_{os.getuid()}")
    return {name: value for name, value in values.items() if name not in environ}


def bind_to_gpu_cores(environ: Mapping[str, str], sysfs: Path = Path("/sys")) -> None:
    """Bind this process to its CPU cores on the NUMA node of the GPU of LOCAL_RANK.

    Pinned host memory is allocated on the node of the process, and copies to a GPU of another node are slower. Call it
    before torch is imported, because threads inherit the cores. CORES_VARIABLE then lists the earlier cores. Nothing
    changes without a GPU, if the GPU's cores are not known, or if the process may use none of them.
    """
    if gpu_sign(environ) is None or "LOCAL_RANK" not in environ:
        return
    query = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=SECONDS_TO_ASK).stdout
        cards = [line.split(", ") for line in listed.splitlines()]
        visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        name = (visible if visible != [""] else [index for index, _, _ in cards])[int(environ["LOCAL_RANK"])].strip()
        domain, bus_id = next(bus for index, uuid, bus in cards if name == index or uuid.startswith(name)).split(":", 1)
        cores = (sysfs / "bus/pci/devices" / f"{domain[-4:]}:{bus_id}".lower() / "local_cpulist").read_text()
    except (OSError, ValueError, LookupError, StopIteration, subprocess.SubprocessError):
        return
    ranges = [part.partition("-") for part in cores.strip().split(",") if part]
    near = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    allowed = os.sched_getaffinity(0)
    if chosen := near & allowed:
        os.environ[CORES_VARIABLE] = ",".join(map(str, sorted(allowed)))
        os.sched_setaffinity(0, chosen)


def cudnn_of_torch() -> Path | None:
    """Return the folder of the cuDNN that pip installed for torch; None if torch uses another one."""
    library = _library_of_torch("cudnn/lib/libcudnn.so*")
    return library and library.parent.parent


def cuda_runtime_of_torch() -> Path | None:
    """Return the folder with the CUDA runtime (libcudart) that pip installed for torch; None if torch uses another
    one.
    """
    library = _library_of_torch("*/lib/libcudart.so.*")
    return library and library.parent


def _library_of_torch(pattern: str) -> Path | None:
    """Return the library with this name in NVIDIA's packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    return next((library for folder in folders for library in sorted(folder.glob(pattern))), None)


def is_one_machine(environ: Mapping[str, str]) -> bool:
    """Return True if the launcher's variables say that all ranks of the job are on this machine."""
    return environ.get("WORLD_SIZE") is not None and environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE")


def loopback_sockets() -> dict[str, str]:
    """Return the variables that make the sockets of NCCL and gloo use the loopback interface."""
    interface = interface_to("127.0.0.1")
    return {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface} if interface else {}


def interface_between_nodes(master: str) -> str | None:
    """Return the network interface that ranks on other nodes can reach; None if that cannot be decided.

    It is the interface that leads to `master`, the first node. On the first node its own name may have loopback
    addresses only. Then it is the interface of the default route, or else the only one with an address. It is the
    loopback interface only if `master` is a loopback address itself, so all ranks are on this machine.
    """
    if master in LOOPBACKS:
        return interface_to(master)
    for host in (*outside_addresses(master), _OUTSIDE):
        interface = interface_to(host)
        if interface not in (None, interface_to("127.0.0.1")):
            return interface
    others = [
        name
        for _, name in socket.if_nameindex()
        if any(_is_outside(address) and not ip_address(address).is_link_local for address in addresses_of(name))
    ]
    return others[0] if len(others) == 1 else None


def outside_addresses(host: str) -> list[str]:
    """Return the addresses of `host` except loopback addresses, which other machines cannot reach."""
    try:
        found = [str(row[4][0]) for row in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)]
    except OSError:
        return []
    return [address for address in found if _is_outside(address)]


def _is_outside(address: str) -> bool:
    return not ip_address(address.partition("%")[0]).is_loopback


def interface_to(host: str) -> str | None:
    """Return the network interface that this machine uses to reach `host`; None if there is none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # connecting a datagram socket chooses the route and sends nothing
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
        except OSError:  # no IPv4 address
            pass
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:  # a kernel without IPv6
        rows = []
    return found + [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[-1] == interface]


def server_cache(environ: Mapping[str, str]) -> Path:
    """Return this node's folder for kernels that SGLang compiles. Create it if it does not exist.

    SGLang's default is in the home folder, but nodes often share it, so the servers of all nodes would wait for one
    lock. Other users may write to the parent folder, so a folder of another user, or one that other users can write to,
    is not used.
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
    """Return the nvcc that SGLang uses to compile kernels at run time; None if it would not find one."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    found = shutil.which(
        "nvcc", path=f"{home}/bin" if home else f"{environ.get('PATH', '')}{os.pathsep}/usr/local/cuda/bin"
    )
    return Path(found) if found else None


def uses_gpu(device: str, environ: Mapping[str, str]) -> bool:
    """Return True if a run with this `device` in its config trains on GPUs."""
    return device == "cuda" or (device == "auto" and gpu_sign(environ) is not None)


def unusable_gpu_problems(device: str, environ: Mapping[str, str], sees_gpu: bool | None = None) -> Iterator[str]:
    """Yield the problem if torch does not see the GPU that `device` needs (cuda) or that this machine has (auto).

    If `sees_gpu` is None, ask torch in another process.
    """
    sign = gpu_sign(environ)
    if device == "cpu" or (device == "auto" and sign is None):
        return
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDDEN:
        yield f"device={device}: CUDA_VISIBLE_DEVICES hides all GPUs; unset it, or use device=auto or device=cpu"
    elif torch_sees_gpu() if sees_gpu is None else sees_gpu:
        return
    elif sign is None:
        yield f"device={device}: torch sees no GPU here; use device=auto or device=cpu"
    else:
        yield (
            f"device={device}: this machine has {sign}, but torch sees no GPU; fix the driver (nvidia-smi shows its"
            " state) or the installed torch (it may be a build for the CPU), or train on the CPU by device: cpu"
        )


def gpu_sign(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the path of a sign of an NVIDIA GPU or driver; None if there is none or CUDA_VISIBLE_DEVICES hides all
    GPUs. A card on the PCI bus is a sign too: it may have no driver, or a container may lack its device files.
    """
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDDEN:
        return None
    for pattern in ("dev/nvidia[0-9]*", "dev/nvidiactl", "proc/driver/nvidia/gpus/*", "proc/driver/nvidia/version"):
        if found := next(iter(sorted(root.glob(pattern))), None):
            return f"/{found.relative_to(root)}"
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == NVIDIA and kind.startswith(DISPLAYS):
                return f"/{device.relative_to(root)}"
    return shutil.which("nvidia-smi", path=environ.get("PATH", ""))


@functools.cache
def torch_sees_gpu() -> bool:
    """Ask torch in a separate process. Return True if that fails, because the ranks report the cause."""
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=SECONDS_TO_ASK)
    except (OSError, subprocess.SubprocessError):
        return True
    return asked.returncode != 0 or "torch sees a GPU: False" not in asked.stdout
