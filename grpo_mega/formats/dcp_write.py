"""Everything that torch's distributed loader needs besides tensor bytes, for checkpoints written without torch's saver.

Each piece of a tensor is a `torch.save` file within a file. The start and length of its bytes are known before any byte
is read, so pieces can be written in any order. The `.metadata` says where each piece is.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
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

from grpo_mega.formats.output import Frame
from grpo_mega.formats.reader import torch_dtype
from grpo_mega.formats.slices import STORAGE_NAMES
from grpo_mega.weights.boxes import Index
from grpo_mega.weights.spec import ModelShape

STATE_FILE = "__1_0.distcp"
# Modules with a Megatron "extra state" in every layer or expert, with or without Transformer Engine.
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
    *(f"self_attention.linear_{name}" for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")),
    *(f"self_attention.{name}" for name in ("in_proj", "out_norm", "out_proj")),
    *("self_attention.kv_layernorm", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
_EXPERT_STATES = ("mlp.experts.experts.linear_fc1", "mlp.experts.experts.linear_fc2")


@dataclass(frozen=True)
class SavedPiece:
    """`tensor[start : start + chunk]` of a tensor of shape `full` saved under `keys`, in `length` bytes of a file."""

    keys: tuple[str, ...]
    full: Index
    start: Index
    chunk: Index
    dtype: str
    file: str
    offset: int
    length: int


def metadata_bytes(pieces: Iterable[SavedPiece], shape: ModelShape) -> bytes:
    """Return the pickled `.metadata` for the pieces of a model and its extra states, which are all in STATE_FILE."""
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
    shared = _StorageInfo(STATE_FILE, 0, len(state_bytes()))
    # The names that Megatron may request, with or without Transformer Engine.
    names = ["decoder.final_layernorm._extra_state/shard_0_1"]
    layers, experts = shape.num_layers, shape.num_experts
    for i in range(layers):
        # If layers differ, each layer has separate keys.
        prefix, at, of = (f"{i}.", "", "") if shape.has_unequal_layers else ("", f"{i}.", f"{layers}.")
        place = "0_1" if shape.has_unequal_layers else f"{i}_{layers}"
        names += [f"decoder.layers.{prefix}{name}._extra_state/shard_{place}" for name in _LAYER_STATES]
        for e in range(experts if i >= shape.num_dense else 0):
            names += [
                f"decoder.layers.{prefix}{name}._extra_state/shard_{at}{e}_{of}{experts}" for name in _EXPERT_STATES
            ]
    for name in names:
        described[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = shared
    return pickle.dumps(Metadata(described, storage_data=storage, version=CURRENT_DCP_VERSION))


def common_bytes() -> bytes:
    """Return the file that Megatron stores once for all ranks, with only the fields that its loader needs."""
    return _saved({"checkpoint_version": 3.0, "iteration": 0})


def state_bytes() -> bytes:
    """Return the content of STATE_FILE: an empty extra state, as Megatron's layers save it without FP8."""
    return _saved([None])


@cache
def frame_of(dtype: str, shape: Index) -> Frame:
    """Return what `torch.save` writes around the bytes of a contiguous tensor. Its CRC32 is 0 until it is known."""
    tensor = torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
    described = io.BytesIO()
    _Pickler(described, tensor, STORAGE_NAMES[dtype]).dump(tensor)
    sink = _Sink()
    writer: Any = torch._C.PyTorchFileWriter(sink)
    for name, content in (("data.pkl", described.getvalue()), ("byteorder", b"little")):
        writer.write_record(name, content, len(content))
    writer.write_record_metadata("data/0", tensor.nbytes)
    writer.write_end_of_file()
    before, after = sink.parts
    # The first CRC32 follows the signature of the data descriptor; the second precedes the name in the directory.
    return Frame(bytes(before), bytes(after), (4, after.rindex(b"archive/data/0") - 30))


class _Pickler(pickle.Pickler):
    """Pickles a tensor without memory like torch.save pickles a tensor whose bytes are in the record data/0."""

    def __init__(self, file: io.BytesIO, tensor: torch.Tensor, storage_name: str) -> None:
        super().__init__(file, protocol=2)
        self._tensor, self._storage_name = tensor, storage_name

    def reducer_override(self, obj: Any) -> Any:
        if obj is not self._tensor:
            return NotImplemented
        arguments: tuple[Any, ...] = (obj.untyped_storage(), 0, tuple(obj.shape), obj.stride(), False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.UntypedStorage):
            return None
        return "storage", getattr(torch, self._storage_name), "0", "cpu", self._tensor.numel()


class _Sink(io.BytesIO):
    """Collects the output of torch.save in parts. The tensor bytes go between the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [bytearray()]

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_CUR
        self.parts.append(bytearray())
        return 0


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
