"""The layers that routing/moved measures depend on the update, not on the process. tests/run has whole runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from grpo_mega.megatron.routers import Replay

LAYERS, NUM_UPDATES = range(2, 5), 9  # two dense layers come first


def moved_in(first: int, last: int) -> list[float]:
    """Return the metric of the updates of one process. The counts of a layer depend on layer and update."""
    megatron: Any = SimpleNamespace(moe_router_fusion=False, tensor_model_parallel_size=1, sequence_parallel=False)
    shape: Any = SimpleNamespace(num_dense=LAYERS.start, num_layers=LAYERS.stop)
    runtime: Any = SimpleNamespace(device=SimpleNamespace(torch_device="cpu"), sum=torch.clone)
    policy = SimpleNamespace(optimizer_step=first)
    replay, found = Replay(megatron, shape, runtime, lambda: policy), []
    for update in range(first, last):
        policy.optimizer_step = update
        compared = [layer for layer in LAYERS if replay.is_compared(layer)]
        assert len(compared) == (3 if update == first else 1), "a process verifies all layers once"
        for layer in compared:
            replay._counts[layer] = torch.tensor([100, 0, 7 * layer + update])
        found.append(replay.check()["routing/moved"])
    return found


def test_the_metric_of_routing_does_not_depend_on_a_resume() -> None:
    whole = moved_in(0, NUM_UPDATES)
    assert whole[0] == 0.21 and whole[1:5] == [0.15, 0.23, 0.31, 0.18]
    for resumed in range(NUM_UPDATES):
        assert [*moved_in(0, resumed), *moved_in(resumed, NUM_UPDATES)] == whole
