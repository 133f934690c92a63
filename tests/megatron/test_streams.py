"""No source is freed, and no target is read, before its copy has run. The copies here run late (late_streams.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FULL = ("reference", "teacher")
CASES = ("offload", *FULL, "borrowed")


@pytest.mark.usefixtures("preloaded_python")
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.full] * (c in FULL)) for c in CASES])
def test_a_copy_ends_before_its_source_is_freed_or_its_target_is_read(case: str) -> None:
    """Run in a separate process, because late streams stay installed."""
    result = subprocess.run([sys.executable, __file__, case], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def run(case: str) -> None:
    from tests.helpers import late_streams

    late_streams.install()
    import torch

    from grpo_mega.megatron import offload
    from grpo_mega.megatron.offload import Teacher

    numbers = torch.arange(7000, dtype=torch.float32)
    # A chunk is smaller than the weights, and the last one is short.
    host = offload.HostCopy(torch.cuda.Stream(), is_pinned=False, chunk_bytes=4096)
    if case == "teacher":
        teacher: Any = Teacher.__new__(Teacher)
        teacher._runtime = SimpleNamespace(raise_on_all_ranks=contextlib.nullcontext)
        teacher._holding, teacher._head, teacher._parameters, teacher._host = {}, None, {"w": numbers.clone()}, host
        teacher.load(lambda box: numbers)
        for _ in range(2):
            with teacher._on_device():
                assert torch.equal(teacher._parameters["w"], numbers)
            assert not teacher._parameters["w"].untyped_storage().nbytes()
        return
    weight = numbers.clone()
    if case == "offload":
        moved = offload.OffloadedStorages(torch.cuda.Stream(), is_pinned=False, chunk_bytes=4096)
        moved.offload([weight.untyped_storage()])
        assert not weight.untyped_storage().nbytes()
        moved.onload()
        assert torch.equal(weight, numbers)
        return
    memory = offload.PolicyMemory([], lambda: [weight], list, is_cuda=False)
    copy = memory.copy_weights(host)
    weight.neg_()
    if case == "reference":
        with memory.with_weights(copy):
            assert torch.equal(weight, numbers)
    else:
        with memory.borrowed():
            weight.zero_()
    assert torch.equal(weight, -numbers)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    run(sys.argv[1])
