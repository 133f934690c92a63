"""Tests of code that only a GPU runs. README.md lists the test of each branch of the package. Without a GPU they are
skipped.

With GRPO_MEGA_REHEARSAL=1 the tests marked `rehearsed` run on a CPU at tiny sizes (tests/test_gpu_branches.py does
this). It shows that the tests themselves work, not that a GPU does. On emulated Transformer Engine kernels
(tests/te_on_cpu) the tests marked `emulated` run at their usual sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mega.distributed.environment import gpu_sign, library_environment

# The variables of a rank, before torch reads them. Kernels are deterministic, because some tests compare two runs of
# one backward pass.
if gpu_sign(os.environ):
    os.environ.update(library_environment(os.environ | {"DETERMINISTIC": "1"}))
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

import torch

from grpo_mega.distributed import kernels
from grpo_mega.distributed.device import Device
from grpo_mega.distributed.launch import only_rank
from tools.benchmarks.gpu.rank import config_of

HERE = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()
IS_REHEARSAL = os.environ.get("GRPO_MEGA_REHEARSAL") == "1"
IS_EMULATED = not HAS_GPU and kernels.choose_kernels(is_cuda=False).transformer_engine


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "rehearsed: of tests/gpu, one that also runs on a CPU when GRPO_MEGA_REHEARSAL=1"
    )
    config.addinivalue_line(
        "markers", "emulated: of tests/gpu, one that also runs on Transformer Engine's emulated kernels"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        mark = "emulated" if IS_EMULATED else "rehearsed" if IS_REHEARSAL else None
        if not HAS_GPU and (mark is None or item.get_closest_marker(mark) is None):
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch sees none here"))


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """Yield this process's device, as the only rank of a job. Each policy creates its process groups."""
    from grpo_mega.megatron import runtime as runtimes

    with only_rank():
        found = runtimes.join(config_of(Path("unused"), {"path": "unused", "dtype": "bfloat16"}))
        try:
            yield found
        finally:
            runtimes.stop()
