"""Whose fused kernels a run uses: Transformer Engine's where it is, NVIDIA Apex's only where that lacks one, else torch's.

Never imports torch, nor what it looks for: Megatron, which has tried, tells what loads. On a CPU there are none but torch's.
The package index's `apex` is an unrelated web package that Megatron would take for NVIDIA's: it is refused.
"""

from __future__ import annotations

import importlib.machinery
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from grpo_mega.errors import ConfigError

APEX_REPOSITORY = "https://github.com/NVIDIA/apex"


Version = tuple[int, ...]
UNFUSED_PACKED: Version = (
    2,
    11,
)  # since when Transformer Engine's unfused attention, which alone has fp32, packs
FUSED_PACKED: Version = (9, 0)  # the compute capability from which its fused attention packs
FLASH_ATTENTION: Version = (2, 1, 1)  # the oldest flash-attn that it uses


@dataclass(frozen=True)
class Found:
    """The packages that Megatron found when it was imported (see megatron/found.py)."""

    transformer_engine: bool
    apex_adam: bool
    apex_weight_gradients: bool
    problem: str = ""  # why an installed Transformer Engine does not load


NOTHING = Found(False, False, False)


@dataclass(frozen=True)
class Kernels:
    """What is in use of whom, and why."""

    transformer_engine: bool
    apex_adam: bool
    apex_weight_gradients: bool
    why: str

    @property
    def fuses_weight_gradients(self) -> bool:
        """Whether weight gradients are added to the fp32 buffers by the kernel that makes them."""
        return self.transformer_engine or self.apex_weight_gradients

    def line(self) -> str:
        """For a run's log."""
        if self.transformer_engine:
            return f"kernels: layers, attention, norms, gradient accumulation and Adam are Transformer Engine's ({self.why})"
        apex = [
            name
            for name, is_used in (("Adam", self.apex_adam), ("gradient accumulation", self.apex_weight_gradients))
            if is_used
        ]
        ours = f"; {' and '.join(apex)} NVIDIA Apex's" if apex else ""
        return f"kernels: layers, attention and norms are torch's{ours or ', and so is Adam'} ({self.why})"


def choose(*, is_cuda: bool, found: Found = NOTHING) -> Kernels:
    """Return what a run uses of what Megatron found, which on a CPU makes no difference.

    Raises ConfigError for a package `apex` that is not NVIDIA's.
    """
    check_apex()
    if not is_cuda:
        return Kernels(False, False, False, "no others run on a CPU")
    if found.transformer_engine:
        return Kernels(True, False, False, f"version {transformer_engine_version()}")
    missing = "Transformer Engine is not installed"
    if transformer_engine_version() is not None or find_spec("transformer_engine") is not None:
        missing = f"the installed Transformer Engine does not load{f': {found.problem}' if found.problem else ''}"
    if find_spec("apex") is None:
        missing += ", nor is NVIDIA Apex" if missing.endswith("not installed") else "; NVIDIA Apex is not installed"
    return Kernels(False, found.apex_adam, found.apex_weight_gradients, missing)


def check_attention(
    dtype: str, capability: Version, name: str, *, transformer_engine: str | None, flash_attn: str | None
) -> None:
    """Raise ConfigError where Transformer Engine has no attention for packed samples on a GPU called `name`.

    Its fused one takes them in bf16 from compute capability 9.0 on; its unfused one since 2.11 and in any dtype, but it holds
    every score, so that below 9.0 flash-attn is asked for whatever the version.
    """
    if transformer_engine is None:
        return
    if dtype == "float32" and as_version(transformer_engine) < UNFUSED_PACKED:
        raise ConfigError(
            "model.dtype=float32: on a GPU must have Transformer Engine 2.11 or later, the first with an attention for it, "
            f"found {transformer_engine}; install a newer one, or use model.dtype=bfloat16"
        )
    has_flash = flash_attn is not None and as_version(flash_attn) >= FLASH_ATTENTION
    if dtype == "bfloat16" and capability < FUSED_PACKED and not has_flash:
        raise ConfigError(
            f"device={name!r}: must have compute capability 9.0 (an H100 or later) for Transformer Engine's fused attention of "
            f"packed samples, found {'.'.join(map(str, capability))} and "
            f"{f'flash-attn {flash_attn}' if flash_attn else 'no flash-attn'}; pip install 'flash-attn>=2.1.1'"
        )


def check_apex() -> None:
    """Raises ConfigError where the installed `apex` is the web package of that name."""
    if find_spec("apex") is not None and not _has("apex.multi_tensor_apply"):
        try:
            found = f"apex {version('apex')}"
        except PackageNotFoundError:
            found = "apex"
        raise ConfigError(
            f"the installed package {found} is not NVIDIA Apex but an unrelated web package, which Megatron would take for it; "
            f"run pip uninstall apex, and build NVIDIA's from {APEX_REPOSITORY} if you have no Transformer Engine"
        )


def transformer_engine_version() -> str | None:
    """The installed one's; None without one."""
    return _version("transformer-engine", "transformer_engine", "transformer-engine-torch")


def flash_attention_version() -> str | None:
    """The installed one's; None without one."""
    return _version("flash-attn")


def cuda_version() -> str | None:
    """Return the CUDA that the installed torch was built with, read from its files; None for a build without."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    lines = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8").splitlines()
    found = [re.search(r"'([\d.]+)'", line) for line in lines if line.startswith("cuda")]
    return found[0][1] if found and found[0] else None


def as_version(text: str) -> Version:
    """Return the leading numbers of "2.11.0+cu12" as (2, 11, 0)."""
    parts = []
    for part in text.split("+")[0].split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def _version(*packages: str) -> str | None:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    return None


def _has(module: str) -> bool:
    """Whether a submodule can be found, its package's own imports failing or not."""
    parent = module.rpartition(".")[0]
    spec = find_spec(parent)
    if spec is None or spec.submodule_search_locations is None:
        return False
    return importlib.machinery.PathFinder.find_spec(module, list(spec.submodule_search_locations)) is not None
