"""Writing the trainer's weights as a Hugging Face checkpoint: the writing rank gathers and writes one shard at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.formats.hf_io import CheckpointWriter, shards
from grpo_mega.weights.apply import execute
from grpo_mega.weights.boxes import Holding
from grpo_mega.weights.layout import hf_holding
from grpo_mega.weights.plan import plan
from grpo_mega.weights.spec import Family, ModelShape

WRITER = 0


def export(
    sources: Sequence[Holding],
    tensors: Mapping[str, Tensor],
    *,
    family: Family,
    shape: ModelShape,
    dtype: torch.dtype,
    source_folder: Path,
    folder: Path,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes `folder` (replacing it) on rank 0; all ranks take part. `source_folder`: whose config and tokenizer it gets."""
    rank = dist.get_rank()
    names = shards(family.hf_tensors(shape), dtype.itemsize, max_shard_bytes)
    writer = CheckpointWriter(folder, source_folder, len(names)) if rank == WRITER else None
    device = next(iter(tensors.values())).device
    for index, shard in enumerate(names):
        holding = hf_holding(family, shape, shard)
        targets = [holding if r == WRITER else {} for r in range(len(sources))]
        gathered = {name: torch.empty(t.shape, dtype=dtype, device=device) for name, t in targets[rank].items()}
        execute(plan(sources, targets), tensors, gathered, dtype=dtype)
        if writer:
            writer.write(index, {name: t.cpu() for name, t in gathered.items()})
    if writer:
        writer.finish()
    dist.barrier()
