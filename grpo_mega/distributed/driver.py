"""Detect a GPU that torch cannot use. Otherwise `device: auto` would silently train on the CPU. Never imports torch."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that select the CPU
SECONDS_TO_ASK = 120.0
_ASK = "import torch; print('torch sees a GPU:', torch.cuda.is_available())"


def unusable_gpu_problems(device: str, environ: Mapping[str, str], sees_gpu: bool | None = None) -> Iterator[str]:
    """Yield the problem if device=auto and torch does not see a GPU. If `sees_gpu` is None, ask torch in another process."""
    sign = gpu_sign(environ) if device == "auto" else None
    if sign is None:
        return
    if sees_gpu is None:
        sees_gpu = torch_sees_gpu()
    if not sees_gpu:
        yield (
            f"device=auto: this machine has {sign}, but torch sees no GPU; fix the driver (nvidia-smi shows its state) or the "
            "installed torch (it may be a build for the CPU), or train on the CPU by device: cpu"
        )


def gpu_sign(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return the path of a sign of an NVIDIA GPU or driver; None if there is none or CUDA_VISIBLE_DEVICES hides all GPUs."""
    if environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in HIDDEN:
        return None
    for pattern in ("dev/nvidia[0-9]*", "dev/nvidiactl", "proc/driver/nvidia/gpus/*", "proc/driver/nvidia/version"):
        if found := next(iter(sorted(root.glob(pattern))), None):
            return f"/{found.relative_to(root)}"
    return shutil.which("nvidia-smi", path=environ.get("PATH", ""))


@functools.cache
def torch_sees_gpu() -> bool:
    """Ask torch in a separate process. Return True if that fails, because the ranks report the cause."""
    try:
        asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=SECONDS_TO_ASK)
    except (OSError, subprocess.SubprocessError):
        return True
    return asked.returncode != 0 or "torch sees a GPU: False" not in asked.stdout
