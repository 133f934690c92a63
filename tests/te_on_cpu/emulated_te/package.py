"""Make the package under test believe that Transformer Engine is installed: replace, from outside, its view of the
machine.

`kernels.choose_kernels` returns TE's kernels, and a CPU device has the card's name and compute capability. The rest of
the package is unchanged: it takes the branches of a GPU if they depend only on Transformer Engine.
"""

from __future__ import annotations

from typing import Any

from tests.te_on_cpu.emulated_te import loader, machine


def emulate(version: str) -> None:
    """Install the emulation in this process. Call once, before anything imports megatron.core."""
    loader.install(version)
    from grpo_mega.distributed import kernels
    from grpo_mega.distributed.device import Device

    why = f"version {version}, emulated on a CPU"
    kernels.choose_kernels = lambda *, is_cuda: kernels.Kernels(True, False, False, why)
    device: Any = Device
    device.capability = property(lambda self: machine.card().capability)
    device.name = property(lambda self: f"{machine.card().name}, emulated")
