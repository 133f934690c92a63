"""Whose fused kernels a run uses: Transformer Engine's where it is, NVIDIA Apex's only where that lacks one, else torch's.

Never imports torch, nor what it looks for. On a CPU there are none but torch's. The package index's `apex` is an unrelated web
package that Megatron would take for NVIDIA's: it is refused.
"""

from __future__ import annotations

import importlib.machinery
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from grpo_mega.errors import ConfigError

APEX_REPOSITORY = "https://github.com/NVIDIA/apex"


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


def choose(*, is_cuda: bool) -> Kernels:
    """Raises ConfigError for a package `apex` that is not NVIDIA's."""
    check_apex()
    if not is_cuda:
        return Kernels(False, False, False, "no others run on a CPU")
    if find_spec("transformer_engine") is not None and find_spec("transformer_engine_torch") is not None:
        return Kernels(True, False, False, f"version {transformer_engine_version()}")
    missing = "Transformer Engine is not installed"
    if find_spec("transformer_engine") is not None:
        missing += " with its part for torch"
    if find_spec("apex") is None:
        return Kernels(False, False, False, f"{missing}, nor is NVIDIA Apex")
    return Kernels(False, _has("apex.optimizers"), find_spec("fused_weight_gradient_mlp_cuda") is not None, missing)


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
    for package in ("transformer-engine", "transformer_engine", "transformer-engine-torch"):
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
