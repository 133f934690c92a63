"""Measure copies from host memory, and memory lost to fragmentation, on one GPU.

An update copies the output layer of each teacher once: here 151,936 rows of 5,120 in bf16. A copy from pinned memory
should reach the rate of the link. Fragmentation is the share of the allocator's reserved memory that its largest
allocation leaves unused. The pattern is that of packed rows: 6 layers of activations whose row length changes in
every micro-batch. The trainer sets expandable segments (distributed/environment.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import torch

from tools.benchmarks.gpu.rank import Figure, Options, finish, seconds_of

RATE_TARGET = 20.0  # GB/s, on a PCIe 5 link


def run(options: Options) -> Iterator[Figure]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, width = (304, 64) if options.tiny else (151_936, 5_120)
    for is_pinned in (False, True):
        if is_pinned and device.type != "cuda":
            options.say("memory: no GPU here: memory is not pinned")
            continue
        head = torch.empty(rows, width, dtype=torch.bfloat16, pin_memory=is_pinned)
        seconds = seconds_of(partial(head.to, device, non_blocking=True, copy=True), device, options.repeat)
        case, target = (
            f"{rows:,} x {width:,}, {'pinned' if is_pinned else 'pageable'}",
            RATE_TARGET if is_pinned else None,
        )
        note = f"{seconds:.3g} s"
        yield Figure("memory", case, "copy to the device", head.nbytes / seconds / 1e9, "GB/s", target, "more", note)
    sizes = [random.Random(0).randint(1_000, 16_384) for _ in range(4 if options.tiny else 64)]
    for expands in (False, True):
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expands}")
        case = f"{'expandable' if expands else 'fixed'} segments"
        yield Figure("memory", case, "reserved but unused", unused_share(sizes, device, options.tiny), "%")


def unused_share(sizes: list[int], device: torch.device, is_tiny: bool) -> float | None:
    """Return the percentage of reserved memory that the peak of allocations does not use; None without a GPU."""
    if device.type == "cuda":
        finish(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    for tokens in sizes:
        widths = [8] if is_tiny else [4_096, 14_336, 28_672]
        layers = [torch.empty(tokens, n, dtype=torch.bfloat16, device=device) for _ in range(6) for n in widths]
        del layers
    if device.type != "cuda":
        return None
    return 100 * (1 - torch.cuda.max_memory_allocated(device) / torch.cuda.max_memory_reserved(device))
