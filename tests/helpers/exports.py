"""Export tensors with `export_policy`, without a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mega.checkpoint_io.adapter import MAX_SHARD_BYTES
from grpo_mega.checkpoint_io.model import ModelFiles
from grpo_mega.trainer.export import export_policy
from grpo_mega.weights.boxes import RankShards
from grpo_mega.weights.families import family_of
from grpo_mega.weights.layout import ShardLayout, hf_rank_shards
from grpo_mega.weights.spec import ModelShape, read_config


def export_shards(
    sources: Sequence[RankShards],
    tensors: Mapping[str, Tensor],
    source: Path,
    out: Path,
    dtype: torch.dtype,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Export this rank's tensors as the policy of a run that started from `source`. All ranks call it."""
    shape = ModelShape.from_hf_config(read_config(source))
    model = ModelFiles(source, None, shape, family_of(shape.model_type), dtype)
    policy: Any = SimpleNamespace(shards=ShardLayout.of_ranks(sources), tensors=lambda: tensors)
    export_policy(policy, model, out, max_shard_bytes)


def export_alone(
    tensors: Mapping[str, Tensor], source: Path, out: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Export tensors with their Hugging Face names in this process, in the dtype of the first."""
    shape = ModelShape.from_hf_config(read_config(source))
    shards = hf_rank_shards(family_of(shape.model_type), shape)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dtype = next(iter(tensors.values())).dtype
        export_shards([shards], {name: tensors[name] for name in shards}, source, out, dtype, max_shard_bytes)
    finally:
        dist.destroy_process_group()
