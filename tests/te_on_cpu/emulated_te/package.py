"""Tells the package under test that Transformer Engine is here: replaces, from outside, what it asks the machine.

`kernels.choose` says that TE's kernels are in use, and a CPU device has the card's name and compute capability. Nothing else of
the package differs: it takes the branches that it would take on a GPU wherever they depend on Transformer Engine alone.
"""

from __future__ import annotations

from typing import Any

from tests.te_on_cpu.emulated_te import loader, machine


def emulate(version: str) -> None:
    """Install the emulation in this process; before anything imports megatron.core, and only once."""
    loader.install(version)
    from grpo_mega.hardware import kernels
    from grpo_mega.hardware.device import Device

    why = f"version {version}, emulated on a CPU"
    kernels.choose = lambda *, is_cuda: kernels.Kernels(True, False, False, why)
    device: Any = Device
    device.capability = property(lambda self: machine.card().capability)
    device.name = property(lambda self: f"{machine.card().name}, emulated")
