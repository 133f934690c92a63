"""Writing the `.metadata` that torch's distributed loader needs, for pieces that were written without its saver."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from grpo_mega.formats.stream import torch_dtype
from grpo_mega.weights.boxes import Index
from grpo_mega.weights.spec import ModelShape

# Modules for which Megatron saves an "extra state", with Transformer Engine or without, in every layer and in every expert.
_LAYER_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_EXPERT_STATES = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


@dataclass(frozen=True)
class SavedPiece:
    """`tensor[start : + chunk]` of the tensor of shape `full` that has the keys, in `length` bytes of a file."""

    keys: tuple[str, ...]
    full: Index
    start: Index
    chunk: Index
    dtype: str
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class SavedState:
    """A file that is one saved object."""

    file: str
    content: bytes


def metadata_bytes(pieces: Iterable[SavedPiece], states: Iterable[str], state: SavedState) -> bytes:
    """Return the pickle. `states` are names of extra states, and the saved `state` is the content of all of them."""
    chunks: dict[str, list[ChunkStorageMetadata]] = defaultdict(list)
    first: dict[str, SavedPiece] = {}
    storage: dict[MetadataIndex, Any] = {}
    for piece in pieces:
        info = _StorageInfo(piece.file, piece.offset, piece.length)
        start = torch.Size(piece.start)
        for key in piece.keys:
            first.setdefault(key, piece)
            chunks[key].append(ChunkStorageMetadata(start, torch.Size(piece.chunk)))
            storage[MetadataIndex(key, start)] = info
    described: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(torch_dtype(p.dtype)), torch.Size(p.full), chunks[key])
        for key, p in first.items()
    }
    shared = _StorageInfo(state.file, 0, len(state.content))
    for name in states:
        described[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = shared
    return pickle.dumps(Metadata(described, storage_data=storage, version=CURRENT_DCP_VERSION))


def common_bytes() -> bytes:
    """Return the file that Megatron keeps once for all ranks, with only the fields that its loader needs."""
    return _saved({"checkpoint_version": 3.0, "iteration": 0})


def no_state() -> SavedState:
    """Return an empty extra state, as Megatron's layers without FP8 save it."""
    return SavedState("__1_0.distcp", _saved([None]))


def extra_states(shape: ModelShape) -> list[str]:
    """Return the names that Megatron may ask for, with Transformer Engine or without."""
    layers, experts = shape.num_layers, shape.num_experts
    names = ["decoder.final_layernorm._extra_state/shard_0_1"]
    for i in range(layers):
        names += [f"decoder.layers.{name}._extra_state/shard_{i}_{layers}" for name in _LAYER_STATES]
        for e in range(experts):
            names += [f"decoder.layers.{name}._extra_state/shard_{i}.{e}_{layers}.{experts}" for name in _EXPERT_STATES]
    return names


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
