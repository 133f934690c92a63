"""Write the trainer's weights as a Hugging Face folder: rank 0 gathers and writes one shard at a time.

config.json and the tokenizer's files are copied byte for byte from the source model's folder, because libraries rewrite fields
when they save a config.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.extra_layers import extra_names
from grpo_mega.formats.hf_files import index_of, side_files, split_into_shards
from grpo_mega.formats.reader import CheckpointReader, open_reader
from grpo_mega.weights.apply import execute
from grpo_mega.weights.boxes import RankShards, whole
from grpo_mega.weights.layout import ShardLayout, hf_rank_shards
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import FLOAT32, Family, ModelShape, read_config

WRITER = 0
MAX_SHARD_BYTES = 5 << 30


def export(
    sources: Sequence[RankShards],
    tensors: Mapping[str, Tensor],
    *,
    family: Family,
    shape: ModelShape,
    dtype: torch.dtype,
    source_folder: Path,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `folder` on rank 0, replacing it. Collective over all ranks. Config and tokenizer come from `source_folder`."""
    rank = dist.get_rank()
    reader = _reader_of_extra(source_folder, family, shape)
    extra = {name: reader.num_bytes(name) for name in extra_names(reader.names)} if reader else {}
    num_bytes = {name: prod(size) * _dtype_of(name, dtype).itemsize for name, size in family.hf_tensors(shape).items()}
    writer = FolderWriter(folder, source_folder, num_bytes | extra, max_shard_bytes)
    if rank == WRITER:
        writer.start()
    device = next(iter(tensors.values())).device
    for file, names in writer.shards.items():
        shards = hf_rank_shards(family, shape, (name for name in names if name not in extra))
        targets = [shards if r == WRITER else {} for r in range(len(sources))]
        plan = plan_transfers(ShardLayout.of_ranks(sources), ShardLayout.of_ranks(targets), ranks_per_node=len(sources))
        gathered = {
            name: torch.empty(t.shape, dtype=_dtype_of(name, dtype), device=device) for name, t in targets[rank].items()
        }
        execute(plan, tensors, gathered, dtype=dtype)
        if rank == WRITER:
            kept = {name: reader.read(whole(name, reader.shape(name))) for name in names if reader and name in extra}
            writer.write(file, {name: t.cpu() for name, t in gathered.items()} | kept)
    if rank == WRITER:
        writer.finish()
    dist.barrier()


def _reader_of_extra(source_folder: Path, family: Family, shape: ModelShape) -> CheckpointReader | None:
    """Return the source model's reader if its config.json names layers for multi-token prediction and its weights exist."""
    try:
        has_extra = read_config(source_folder).get("num_nextn_predict_layers")
        return open_reader(source_folder, family, shape) if has_extra else None
    except WeightMappingError:
        return None


def _dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(FLOAT32) else dtype


class FolderWriter:
    """Writes a checkpoint shard by shard. The folder appears under its name only when `finish` is called.

    `num_bytes`: size of every tensor, in order. `shards`: tensor names by file name.
    """

    def __init__(
        self, folder: Path, source_folder: Path, num_bytes: Mapping[str, int], max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self.shards = split_into_shards(num_bytes, max_shard_bytes)
        self._folder, self._source_folder, self._num_bytes = folder, source_folder, num_bytes
        self._partial = folder.with_name(folder.name + ".partial")

    def start(self) -> None:
        """Remove the remains of an interrupted write, and copy all files except weights."""
        if self._partial.exists():
            shutil.rmtree(self._partial)
        self._partial.mkdir(parents=True)
        for path in side_files(self._source_folder):
            target = self._partial / path.relative_to(self._source_folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)

    def write(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        save_file({k: v.contiguous() for k, v in tensors.items()}, self._partial / file, metadata={"format": "pt"})

    def finish(self) -> None:
        for name, content in index_of(self.shards, self._num_bytes).items():
            (self._partial / name).write_bytes(content)
        if self._folder.exists():
            shutil.rmtree(self._folder)
        os.rename(self._partial, self._folder)
