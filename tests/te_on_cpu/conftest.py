"""Tests of Transformer Engine on emulated kernels. A plain pytest process collects test_processes.py and
test_whole_steps.py.

test_processes.py starts processes that run the other files and tests/gpu. test_whole_steps.py starts training runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from grpo_mega.distributed.launch import only_rank

HERE = Path(__file__).parent
LAUNCHING = {"test_processes.py", "test_whole_steps.py"}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_test = collection_path.parent == HERE and collection_path.name.startswith("test_")
    is_emulated = config.pluginmanager.hasplugin("tests.te_on_cpu.emulated_te.plugin")
    return True if is_test and is_emulated == (collection_path.name in LAUNCHING) else None


@pytest.fixture
def only_member() -> Iterator[None]:
    """Yield in a process group with this process as its only member: the session's group, or a new one for this
    test.
    """
    if dist.is_initialized():
        yield
        return
    with only_rank():
        dist.init_process_group("gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()
