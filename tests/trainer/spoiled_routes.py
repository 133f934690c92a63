"""Train in this process with a fault in routing replay: `python spoiled_routes.py FAULT CONFIG ARGUMENT ...`."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from grpo_mega.cli import main
from grpo_mega.trainer import batches
from grpo_mega.types import PackedBatch, Sample


def flip_a_byte() -> None:
    """Change one recorded expert of the last sample between engine and trainer."""
    row_of = batches.routes_row

    def flipped(batch: PackedBatch, samples: Sequence[Sample]) -> torch.Tensor | None:
        row = row_of(batch, samples)
        assert row is not None
        row[3, 1, 0] ^= 1
        return row

    batches.routes_row = flipped


def use_other_experts() -> None:
    """Let the router of the third layer ignore the recorded experts, as a fused router does."""
    from grpo_mega.megatron import routers

    told = routers.Replayed.get_replay_topk

    def other(self: Any, scores: torch.Tensor, *args: Any) -> Any:
        values, experts = told(self, scores, *args)
        return (values, (experts + 1) % scores.shape[1]) if self.layer == 2 else (values, experts)

    routers.Replayed.get_replay_topk = other  # type: ignore[method-assign]


if __name__ == "__main__":
    {"byte": flip_a_byte, "router": use_other_experts}[sys.argv[1]]()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    sys.exit(main(["train", *sys.argv[2:]]))
