"""The memory that the device layer reports, on a CPU."""

import pytest
import torch

from grpo_mega.hardware.device import Device, PeakMemory

CPU = Device("cpu", torch.device("cpu"))


def test_a_peak_is_seen_once_though_the_memory_is_gone() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        try:
            file.write("5")
            file.flush()
        except OSError:
            pytest.skip("this kernel does not let a process forget its peak")
    peak = PeakMemory(CPU)
    before = peak.take()
    torch.ones(64 << 20, dtype=torch.uint8).sum()
    during, after = peak.take(), peak.take()
    assert during - before > 60 << 20 and after < during - (30 << 20)
