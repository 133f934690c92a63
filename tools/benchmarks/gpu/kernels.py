"""Summarize what a device did during a step, from the events of torch.profiler: its largest kernels, the time without
a kernel, and the time of matrix products.

Kernels of several streams overlap, so shares of the step come from the union of their times. Copies and fills count as
kernels: the device is not idle.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tools.benchmarks.gpu.rank import Figure, finish

LARGEST = 10
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of torch's trace on a GPU
HOST = ("cpu_op",)  # stands for them on a CPU
# Names of cuBLAS (nvjet, xmma, ampere_..._s16816gemm, splitKreduce), CUTLASS and DeepGEMM. Attention and convolutions
# have the same words in their names, and are no matrix products of their own.
PRODUCTS = re.compile(r"gemm|gemv|nvjet|xmma|splitk_?reduce|cutlass|^aten::(add|b)?mm$", re.IGNORECASE)
OTHERS = re.compile(r"flash|fmha|sdpa|attention|conv[^e]|dgrad|fprop", re.IGNORECASE)
LONGEST_NAME = 80

Span = tuple[float, float]  # start and end, microseconds


@dataclass(frozen=True)
class Summary:
    """Times in seconds."""

    step: float
    busy: float  # at least one kernel runs
    products: float  # at least one matrix product runs
    largest: list[tuple[str, float, int]]  # name, the sum of its times, calls; longest first

    def figures(self, case: str) -> Iterator[Figure]:
        yield Figure("mfu", case, "time without a kernel", 100 * (1 - self.busy / self.step), "%")
        yield Figure("mfu", case, "time with a matrix product", 100 * self.products / self.step, "%")
        for place, (name, seconds, calls) in enumerate(self.largest, 1):
            note = f"{100 * seconds / self.step:.3g}% of the step, {calls} calls"
            yield Figure("mfu", case, f"kernel {place}: {short(name)}", 1e3 * seconds, "ms", note=note)


def summarize(events: Iterable[Mapping[str, Any]], step: float, categories: tuple[str, ...] = DEVICE) -> Summary:
    """Return the summary of Chrome's trace events of one step of `step` seconds."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in categories:
            start = float(event["ts"])
            spans[str(event.get("name", ""))].append((start, start + float(event.get("dur", 0))))
    sums = [(name, sum(end - start for start, end in of_name) / 1e6, len(of_name)) for name, of_name in spans.items()]
    return Summary(
        step,
        union(span for of_name in spans.values() for span in of_name),
        union(span for name, of_name in spans.items() if is_product(name) for span in of_name),
        sorted(sums, key=lambda item: (-item[1], item[0]))[:LARGEST],
    )


def union(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one span covers."""
    covered, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, last))
        last = max(last, end)
    return covered / 1e6


def is_product(name: str) -> bool:
    return bool(PRODUCTS.search(name)) and not OTHERS.search(name)


def short(name: str) -> str:
    """Return a name for one cell of a table."""
    plain = re.sub(r"\s+", " ", name).strip().removeprefix("void ").replace("|", "/") or "without a name"
    return plain if len(plain) <= LONGEST_NAME else f"{plain[: LONGEST_NAME - 3]}..."


def profiled(act: Callable[[], object], device: torch.device) -> Summary:
    """Run `act` twice, and profile the second time."""
    act()
    finish(device)
    is_cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU], acc_events=True) as profiler:
        started_at = time.perf_counter()
        act()
        finish(device)
        seconds = time.perf_counter() - started_at
    with tempfile.TemporaryDirectory(prefix="bench_gpu_") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summarize(events, seconds, DEVICE if is_cuda else HOST)
