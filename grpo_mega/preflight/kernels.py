"""The machines of a job: their ranks, GPU and packages, and the kernels that a run gets from these packages.

Kernels are from Transformer Engine if it loads, otherwise from NVIDIA Apex, otherwise from torch. On a CPU they are all
torch's. This module does not import torch or these packages, because Megatron has already tried to load them. The
package `apex` on PyPI is an unrelated web package that Megatron would mistake for NVIDIA Apex, so it is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from grpo_mega.config import LayoutConfig
from grpo_mega.distributed.environment import cuda_compiler
from grpo_mega.errors import ConfigError
from grpo_mega.preflight.cards import Card

APEX_REPOSITORY = "https://github.com/NVIDIA/apex"

Version = tuple[int, ...]
# First Transformer Engine with packed samples in unfused attention, which supports fp32.
UNFUSED_PACKED: Version = (
    2,
    11,
)
PACKED_A2A: Version = (2, 10)  # first Transformer Engine with packed samples in a2a context parallelism
FUSED_PACKED: Version = (9, 0)  # lowest compute capability for packed samples in Transformer Engine's fused attention
FLASH_ATTENTION: Version = (2, 1, 1)  # oldest flash-attn that Transformer Engine uses


@dataclass(frozen=True)
class Kernels:
    """The packages that a run's kernels come from, and the reason for the choice."""

    transformer_engine: bool
    apex_adam: bool
    apex_weight_gradients: bool
    why: str

    @property
    def fuses_weight_gradients(self) -> bool:
        """Return True if the kernel that computes weight gradients also adds them to the fp32 buffers."""
        return self.transformer_engine or self.apex_weight_gradients

    def line(self) -> str:
        """Return the line for a run's log."""
        if self.transformer_engine:
            return (
                "kernels: layers, attention, norms, gradient accumulation and Adam are Transformer Engine's"
                f" ({self.why})"
            )
        apex = ["Adam"] * self.apex_adam + ["gradient accumulation"] * self.apex_weight_gradients
        ours = f"; {' and '.join(apex)} NVIDIA Apex's" if apex else ""
        return f"kernels: layers, attention and norms are torch's{ours or ', and so is Adam'} ({self.why})"


def choose_kernels(
    *,
    is_cuda: bool,
    transformer_engine: bool = False,
    apex_adam: bool = False,
    apex_weight_gradients: bool = False,
    problem: str = "",
) -> Kernels:
    """Choose the kernels of a run from the packages that Megatron could load. On a CPU these packages are not used.

    `problem`: why an installed Transformer Engine does not load. Raise ConfigError if the package `apex` is not NVIDIA
    Apex.
    """
    check_apex()
    if not is_cuda:
        return Kernels(False, False, False, "no others run on a CPU")
    if transformer_engine:
        return Kernels(True, False, False, f"version {transformer_engine_version()}")
    missing = "Transformer Engine is not installed"
    if transformer_engine_version() is not None or find_spec("transformer_engine") is not None:
        missing = f"the installed Transformer Engine does not load{f': {problem}' if problem else ''}"
    if find_spec("apex") is None:
        missing += ", nor is NVIDIA Apex" if missing.endswith("not installed") else "; NVIDIA Apex is not installed"
    return Kernels(False, apex_adam, apex_weight_gradients, missing)


def check_apex() -> None:
    """Raise ConfigError if the installed `apex` is the unrelated web package."""
    spec = find_spec("apex")
    if spec is None:
        return
    # Search the package's folder, because importing the package might fail.
    if PathFinder.find_spec("apex.multi_tensor_apply", list(spec.submodule_search_locations or ())) is None:
        package = f"apex {installed_version('apex') or ''}".rstrip()
        raise ConfigError(
            f"the installed package {package} is not NVIDIA Apex but an unrelated web package, and Megatron would"
            f" mistake it for Apex; run pip uninstall apex, and build NVIDIA's from {APEX_REPOSITORY} if you have no"
            " Transformer Engine"
        )


def transformer_engine_version() -> str | None:
    """Return the version of the installed Transformer Engine; None without one."""
    return installed_version("transformer-engine", "transformer_engine", "transformer-engine-torch")


def flash_attention_version() -> str | None:
    """Return the version of the installed flash-attn; None without one."""
    return installed_version("flash-attn")


def cuda_version() -> str | None:
    """Return the CUDA version of the installed torch, read from its files; None for a build without CUDA."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    lines = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8").splitlines()
    matches = [re.search(r"'([\d.]+)'", line) for line in lines if line.startswith("cuda")]
    return matches[0][1] if matches and matches[0] else None


def as_version(text: str) -> Version:
    """Return the leading numbers of "2.11.0+cu12" as (2, 11, 0)."""
    parts = []
    for part in text.split("+")[0].split("."):
        if not part.isdecimal():
            break
        parts.append(int(part))
    return tuple(parts)


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


@dataclass(frozen=True)
class Machine:
    """The machines of a job. Packages are the ones installed here, because no others are known."""

    world_size: int
    ranks_per_node: int
    card: Card | None = (
        None  # GPU of a job that is planned for other machines; None: it runs here, and ranks ask their GPU
    )
    transformer_engine: str | None = field(default_factory=transformer_engine_version)
    flash_attention: str | None = field(default_factory=flash_attention_version)
    cuda: str | None = field(default_factory=cuda_version)
    has_sglang: bool = field(default_factory=lambda: find_spec("sglang") is not None)
    compiler: Path | None = field(default_factory=lambda: cuda_compiler(os.environ))

    @property
    def is_here(self) -> bool:
        return self.card is None

    def gpu(self, device: str) -> tuple[Version | None, str]:
        """Return the GPU's compute capability, None if it is not known, and its name. The ranks check theirs."""
        if self.card is not None:
            return self.card.capability, self.card.title
        return (FUSED_PACKED if device == "cuda" else None), "cuda"


def this_machine(layout: LayoutConfig, ranks: Mapping[str, str] | None = None) -> Machine:
    """Return this machine with the ranks that torchrun started, by its environment `ranks`, or else with the layout's
    ranks.
    """
    if ranks is None:
        return Machine(layout.world_size, layout.world_size)
    return Machine(int(ranks["WORLD_SIZE"]), int(ranks.get("LOCAL_WORLD_SIZE", ranks["WORLD_SIZE"])))


def installed_version(*packages: str) -> str | None:
    """Return the version of the first of these packages that is installed; None if none is."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            pass
    return None
