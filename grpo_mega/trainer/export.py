"""Write the trained policy as a Hugging Face checkpoint, and its adapter as a PEFT folder."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from grpo_mega.checkpoint_io import adapter
from grpo_mega.checkpoint_io.adapter import MAX_SHARD_BYTES
from grpo_mega.checkpoint_io.hf_files import (
    extra_names,
    folder_tensors,
    index_of,
    may_have_extra,
    side_contents,
    split_into_shards,
    with_old_fields,
)
from grpo_mega.checkpoint_io.model import ModelFiles, read_tokenizer
from grpo_mega.checkpoint_io.output import make_partial, publish_folder
from grpo_mega.checkpoint_io.reader import CheckpointReader, joined, open_reader
from grpo_mega.config import LoraConfig
from grpo_mega.data.chat import find_end_token
from grpo_mega.errors import WeightMappingError
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron.policy import Policy
from grpo_mega.paths import read_json
from grpo_mega.tracking.progress import phase
from grpo_mega.weights.apply import execute
from grpo_mega.weights.boxes import RankShards, whole
from grpo_mega.weights.layout import ShardLayout, hf_rank_shards
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import FLOAT32, read_config

GENERATION_CONFIG = "generation_config.json"


def export_adapter(policy: Policy, model: ModelFiles, lora: LoraConfig, folder: Path) -> None:
    """Write the policy's adapter as a PEFT folder on rank 0, replacing it. All ranks call it."""
    optimizers.wait_for_param_gather(policy.chunks)
    family = policy.lora.family
    shards, wanted = policy.lora.shards, hf_rank_shards(family, model.shape)
    sources = ShardLayout.of_ranks([shards.rank_shards(rank) for rank in range(shards.world_size)])
    gathered = gather_on_first(sources, policy.lora.parameters, wanted, model.dtype)
    if gathered:
        adapter.write(folder, gathered, lora, family, model.folder)
    dist.barrier()


def gather_on_first(
    sources: ShardLayout, tensors: Mapping[str, torch.Tensor], wanted: RankShards, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the `wanted` tensors on rank 0, in `dtype` or the fixed dtype of their name; {} on the other ranks."""
    is_first, world_size = dist.get_rank() == 0, sources.world_size
    targets = ShardLayout.of_ranks([wanted if rank == 0 else {} for rank in range(world_size)])
    plan = plan_transfers(sources, targets, ranks_per_node=world_size)
    device = next(iter(tensors.values())).device
    gathered = {
        name: torch.empty(local.shape, dtype=torch.float32 if name.endswith(FLOAT32) else dtype, device=device)
        for name, local in (wanted.items() if is_first else ())
    }
    execute(plan, tensors, gathered, dtype=dtype)
    return gathered


def export_policy(
    policy: Policy,
    model: ModelFiles,
    folder: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    record: Mapping[str, bytes | Path] = MappingProxyType({}),
    *,
    shows_progress: bool = False,
) -> None:
    """Write the policy as a Hugging Face folder on rank 0, replacing it. All ranks call it.

    `record`: further files of the folder by name, such as the step of the policy.

    Rank 0 gathers and writes one shard at a time. The folder appears only when it is complete. Config and tokenizer are
    copied byte for byte from the start model (except as in `side_contents`), because libraries rewrite fields when they
    save a config.
    """
    is_writer = dist.get_rank() == 0
    family, shape, tensors, world_size = model.family, model.shape, policy.tensors(), policy.shards.world_size
    sources = ShardLayout.of_ranks([policy.shards.rank_shards(rank) for rank in range(world_size)])
    reader: CheckpointReader | None = None  # for parts that the policy leaves out
    with suppress(WeightMappingError):  # the start model has no weights
        if may_have_extra(read_config(model.folder)):
            reader = open_reader(model.folder, family, shape)
    extra = {name: reader.num_bytes(name) for name in extra_names(reader.names)} if reader else {}
    stored = folder_tensors(family.hf_tensors(shape), stacks_experts=family.stacks_experts)
    dtypes = {name: torch.float32 if name.endswith(FLOAT32) else model.dtype for name in stored}
    num_bytes = {name: prod(size) * dtypes[name].itemsize for name, (size, _) in stored.items()} | extra
    shards = split_into_shards(num_bytes, max_shard_bytes)
    partial = make_partial(folder) if is_writer else None
    with phase("writing the policy", shows_progress and is_writer, sum(num_bytes.values()), "bytes") as bar:
        for file, names in shards.items():
            own = {name: stored[name] for name in names if name not in extra}
            wanted = hf_rank_shards(family, shape, (part for _, parts in own.values() for part in parts))
            gathered = gather_on_first(sources, tensors, wanted, model.dtype)
            if partial:
                kept = {
                    name: reader.read(whole(name, reader.shape(name))) for name in names if reader and name in extra
                }
                written = joined(gathered, own) | kept
                content = {name: tensor.cpu().contiguous() for name, tensor in written.items()}
                save_file(content, partial / file, metadata={"format": "pt"})
            bar.advance(sum(num_bytes[name] for name in names))
    if partial:
        shutil.rmtree(folder, ignore_errors=True)
        side = side_contents(model.folder, str(model.dtype).removeprefix("torch."))
        publish_folder(partial, folder, side | index_of(shards, num_bytes) | dict(record))
    dist.barrier()


def with_end_token(model: ModelFiles, stop_token_ids: Sequence[int]) -> dict[str, bytes]:
    """Return the model's file of eos ids, by its name, with the token that ends a turn, which sft trains.

    Return {} if the model's files name the token, or if no token ends a turn.
    """
    tokenizer, ids = read_tokenizer(model.folder, model.shape.vocab), model.special_ids("eos_token_id")
    token, _ = find_end_token(tokenizer, model.stop_ids(tokenizer, stop_token_ids))
    if token is None or token in ids:
        return {}
    name = GENERATION_CONFIG if (model.folder / GENERATION_CONFIG).exists() else "config.json"
    values = with_old_fields(read_json(model.folder / name), str(model.dtype).removeprefix("torch."))
    values |= {"eos_token_id": [*sorted(ids), token]}
    return {name: json.dumps(values, indent=2).encode() + b"\n"}
