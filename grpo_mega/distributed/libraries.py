"""The CUDA libraries that this process has really loaded, and the environment variables that change its numbers.

A login shell changes both silently: LD_LIBRARY_PATH may lead to another cuDNN than torch's, and a variable to another
kernel. All ranks compare them (trainer/inputs.py), rank 0 logs them, and tools/check_node.py compares them over nodes.
Imports only the standard library.
"""

import ctypes
import importlib.util
import os
import re
import sys
from pathlib import Path

from grpo_mega.errors import ConfigError

# Library -> its function that returns the version, or writes it to an int. It needs no GPU.
LIBRARIES = {
    "cudnn": "cudnnGetVersion",
    "nccl": "ncclGetVersion",
    "cublas": "cublasGetCudartVersion",
    "cublasLt": "cublasLtGetVersion",
    "cudart": "cudaRuntimeGetVersion",
}
# A mapped file in /proc/PID/maps. Its path may have spaces, and its name a wheel's hash. The kernel marks a file that
# was removed or replaced.
_MAPPED = re.compile(
    r"^(?:\S+ +){5}(/.*/lib(cudnn|nccl|cublas|cublasLt|cudart)(?:-[0-9a-f]{8})?\.so[.\d]*(?: \(deleted\))?)$", re.M
)
_CHANGES_NUMBERS = re.compile(
    r"""
    (?!TORCH_NCCL_ | [^=]*=/)  # paths
    (?!(?:[^=]*_)?(?:
        ALLOC | DBG | DEBUG | LOG | LOGDEST | LOGINFO | LOGS | STACKTRACES | THREADS | TIMEOUT | TRACE | VERBOSE
        | HOST | KEY | PORT | RANK | TOKEN  # secrets, and what differs between ranks
    )[_=])
    (?:
        NVTE_                                      # Transformer Engine
        | NVIDIA_TF32_                             # all libraries of NVIDIA
        | CUDNN_ | CUBLAS_ | CUBLASLT_
        | NCCL_ALGO= | NCCL_PROTO=
        | PYTORCH_ | TORCH_ | TORCHINDUCTOR_ | TORCHDYNAMO_ | TRITON_
        | ATEN_ | ONEDNN_ | DNNL_ | MKL_ | OPENBLAS_  # torch on a CPU
        | FLASH_ATTENTION_ | FLASHINFER_
        | SGLANG_ | SGL_
        | DETERMINISTIC=                           # environment.py
    )
    """,
    re.X,
)
# Start of a variable's name -> the package whose installed version says which names it reads
_SOURCES = {"SGLANG_": "sglang", "NVTE_": "transformer_engine"}


def describe() -> str:
    """Return a line with the libraries and the variables. It marks names of variables that no library reads."""
    variables = read_variables()
    # Names that Transformer Engine and NVIDIA's libraries read, with the versions of these.
    known = {*Path(__file__).with_name("known_variables.txt").read_text("utf-8").split()}
    for family, package in _SOURCES.items():
        if any(name.startswith(family) for name in variables.keys() - known):
            known |= _names_in(package, family)
    families = {name.split("_")[0] for name in known}
    parts = [
        f"{name}={value}{' (unknown, check the name)' if name.split('_')[0] in families and name not in known else ''}"
        for name, value in (read_libraries() | variables).items()
    ]
    return f"libraries and variables that change numbers: {', '.join(parts) or 'none'}"


def read_variables() -> dict[str, str]:
    """Return the variables that change numbers."""
    return {name: value for name, value in sorted(os.environ.items()) if _CHANGES_NUMBERS.match(f"{name}={value}")}


def read_libraries(maps: Path = Path("/proc/self/maps")) -> dict[str, str]:
    """Return the version of each loaded CUDA library, by name and file. Without a CUDA build of torch there is none.

    Raise ConfigError if two versions of one are loaded, because it is not known which one computes. The CUDA runtime
    computes nothing.
    """
    libraries = {
        f"{name} {_shown(path)}": _version(path, name)
        for path, name in sorted(_MAPPED.findall(maps.read_text("utf-8", "surrogateescape")))
    }
    for name in ("cudnn", "nccl", "cublasLt"):
        copies = [f"{file}={libraries[file]}" for file in libraries if file.split()[0] == name]
        if len({copy.rpartition("=")[2] for copy in copies}) > 1:
            raise ConfigError(
                f"{name}: two versions are loaded, {' and '.join(copies)}; keep the folder of one out of"
                " LD_LIBRARY_PATH"
            )
    return libraries


def _names_in(package: str, family: str) -> set[str]:
    """Return the names of this family in the source of an installed package. SGLang's 60 MB take half a second."""
    spec = importlib.util.find_spec(package)
    files = Path(spec.origin).parent.rglob("*.py") if spec and spec.origin else ()
    texts = (path.read_bytes() for path in files if path.is_file())
    return {name.decode() for text in texts for name in re.findall(rf"{family}\w+".encode(), text)}


def _shown(path: str) -> str:
    """Return a path relative to Python's packages, because they may be at another place on each node."""
    return min((path.removeprefix(f"{os.path.realpath(entry)}/") for entry in sys.path), key=len)


def _version(path: str, name: str) -> str:
    """Return the version that a loaded file reports, such as 91400. A deleted file reports none."""
    number = ctypes.c_int()
    try:
        returned = getattr(ctypes.CDLL(path, mode=os.RTLD_NOLOAD), LIBRARIES[name])(ctypes.byref(number))
        return f"{number.value or returned}"
    except (OSError, AttributeError):
        return "unknown"
