"""The two conversions. Both stream, resume, verify their output, and create the output's name only after that.

A Megatron checkpoint is written without torch's saver, with everything that torch's distributed loader needs. Each
piece of a tensor is a `torch.save` file within a file. The start and length of its bytes are known before any byte is
read, so pieces can be written in any order. The `.metadata` says where each piece is.
"""

import io
import json
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, reduce
from pathlib import Path
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

from grpo_mega.checkpoint_io.dcp_read import COMMON, FORMAT, METADATA
from grpo_mega.checkpoint_io.detect import Checkpoint, find_checkpoint
from grpo_mega.checkpoint_io.hf_files import (
    dtype_fields,
    extra_names,
    folder_tensors,
    header_of,
    index_of,
    may_have_extra,
    side_contents,
    split_into_shards,
)
from grpo_mega.checkpoint_io.hf_weights import HfWeights, check_shapes, check_tied
from grpo_mega.checkpoint_io.megatron_weights import MegatronWeights, stored_extra, stored_tensors
from grpo_mega.checkpoint_io.output import Frame, Item, OutputPlan, Report, check_free, write
from grpo_mega.checkpoint_io.reader import torch_dtype
from grpo_mega.checkpoint_io.slices import (
    ITEM_BYTES,
    STORAGE_NAMES,
    TORCH_NAMES,
    Weights,
    known_dtype,
    main_dtype,
    target_of,
)
from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.weights.boxes import Index, LocalTensor, alone, whole
from grpo_mega.weights.spec import ModelShape

DEFAULT_SHARD_BYTES = 5_000_000_000
_FILE_BYTES = 8 << 30  # start another file at about this size; a rank reads only the files that it needs
_ALIGNMENT = 64
_FORMAT = {  # the content of Megatron's metadata.json
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def convert_hf_to_mcore(
    folder: Path, out: Path, *, dtype: str | None = None, workers: int = 2, show_progress: bool = True
) -> Report:
    """Convert a Hugging Face folder to a Megatron distributed checkpoint, including config and tokenizer.

    `dtype`: torch's name of the dtype to cast to; None keeps the dtype of each tensor. Raise a one-line ConfigError or
    WeightMappingError for anything that cannot be converted, before writing anything if the headers show it.
    """
    cast = known_dtype(dtype)
    check_free(out)
    checkpoint = find_checkpoint(folder)
    if checkpoint.is_megatron:
        raise ConfigError(f"{folder} is already a Megatron checkpoint; convert it by `grpo-mega convert`")
    weights = checkpoint.open()
    assert isinstance(weights, HfWeights)
    plan = megatron_plan(checkpoint, weights, cast)
    family, shape = checkpoint.model()
    if shape.tied:
        check_tied(folder, family.output.hf[0], family.embedding.hf[0], weights.tensors)
    return write(plan, out, workers, show_progress)


def convert_mcore_to_hf(
    folder: Path,
    out: Path,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: str | None = None,
    workers: int = 2,
    config_folder: Path | None = None,
    show_progress: bool = True,
) -> Report:
    """Convert a Megatron distributed checkpoint to a Hugging Face folder.

    The checkpoint may come from a conversion or a run, in any parallel layout. `config_folder`: the folder of
    config.json and tokenizer, if the checkpoint does not name one.
    """
    cast = known_dtype(dtype)
    check_free(out)
    checkpoint = find_checkpoint(folder, config_folder)
    if not checkpoint.is_megatron:
        if checkpoint.note is not None:
            raise ConfigError(f"{checkpoint.note}, which is already a Hugging Face folder; use that folder")
        raise ConfigError(f"{folder} is already a Hugging Face folder; convert it by `grpo-mega convert`")
    weights = checkpoint.open()
    assert isinstance(weights, MegatronWeights)
    try:
        weights.check_crcs(workers, show_progress)
        return write(hf_plan(checkpoint, weights, max_shard_bytes, cast), out, workers, show_progress)
    finally:
        weights.close()


def megatron_plan(checkpoint: Checkpoint, weights: HfWeights, dtype: str | None) -> OutputPlan:
    """Plan a Megatron distributed checkpoint of a Hugging Face folder. `dtype` None keeps the tensors' dtypes.

    Raise WeightMappingError if the folder does not contain the tensors that its config.json describes.
    """
    family, shape = checkpoint.model()
    check_shapes(checkpoint.side, weights.shapes, family.hf_tensors(shape))
    items, saved, offset = [], [], 0
    sizes: dict[str, int] = {}
    for stored in (*stored_tensors(family, shape), *stored_extra(weights.shapes)):
        # Gate and up projections become two tensors, as in Megatron. Everything else, including interleaved heads,
        # stays one tensor.
        parts = [(piece.offset[0], alone(piece.box)) for piece in stored.tensor.pieces]
        for row, piece in parts if len(parts) == 2 else [(0, stored.tensor)]:
            target = target_of(piece, weights, dtype)
            chunk = (1,) * len(stored.place) + piece.shape
            frame = frame_of(target.dtype, chunk)
            if offset > _FILE_BYTES or not sizes:
                offset, file = 0, f"__0_{len(sizes)}.distcp"
            items.append(Item(file, offset, target, frame))
            start = (*stored.place, row, *(0,) * (len(piece.shape) - 1))
            full = (*stored.stack, *stored.tensor.shape)
            length = len(frame.before) + target.num_bytes + len(frame.after)
            saved.append(SavedPiece(stored.keys, full, start, chunk, target.dtype, file, offset, length))
            offset += -(-length // _ALIGNMENT) * _ALIGNMENT
            sizes[file] = offset
    last = _side_contents(checkpoint, weights, dtype) | {
        COMMON: common_bytes(),
        STATE_FILE: state_bytes(),
        METADATA: metadata_bytes(saved, shape),
        FORMAT: json.dumps(_FORMAT).encode(),
    }
    return OutputPlan(sizes, items, {}, last, weights.files, f"to Megatron {dtype}")


def hf_plan(checkpoint: Checkpoint, weights: MegatronWeights, max_shard_bytes: int, dtype: str | None) -> OutputPlan:
    """Plan the Hugging Face folder of a Megatron checkpoint, in the order of the family's table."""
    stored = folder_tensors(weights.shapes, stacks_experts=checkpoint.model()[0].stacks_experts)
    shapes, targets = {name: shape for name, (shape, _) in stored.items()}, {}
    for name, (_, parts) in stored.items():
        pieces = (alone(whole(part, weights.shapes[part])) for part in parts)
        targets[name] = replace(target_of(reduce(LocalTensor.above, pieces), weights, dtype), name=name)
    source = None
    if may_have_extra(checkpoint.config()) and not extra_names(weights.shapes):
        # A run does not store the parts that it does not train. Its source model may have them, or only a config.
        with suppress(WeightMappingError):
            source = find_checkpoint(checkpoint.side).open()
    if source is not None:
        for name in extra_names(source.shapes):
            shapes[name] = source.shapes[name]
            targets[name] = target_of(alone(whole(name, shapes[name])), source, dtype)
    num_bytes = {name: target.num_bytes for name, target in targets.items()}
    shards = split_into_shards(num_bytes, max_shard_bytes)
    items, headers, sizes = [], {}, {}
    for file, names in shards.items():
        # Wider elements first, so that all tensors are aligned.
        names.sort(key=lambda name: -ITEM_BYTES[targets[name].dtype])
        headers[file], offsets = header_of((name, targets[name].dtype, shapes[name]) for name in names)
        items += [Item(file, offset, targets[name]) for name, offset in zip(names, offsets, strict=True)]
        sizes[file] = offsets[-1] + num_bytes[names[-1]]
    last = _side_contents(checkpoint, weights, dtype) | index_of(shards, num_bytes)
    return OutputPlan(sizes, items, headers, last, weights.files, f"to Hugging Face {max_shard_bytes} {dtype}")


def _side_contents(checkpoint: Checkpoint, weights: Weights, dtype: str | None) -> dict[str, bytes | Path]:
    """Return the files that accompany the weights. Adapt config.json to another dtype or to removed quantisation."""
    config, written = checkpoint.config(), TORCH_NAMES[dtype] if dtype else main_dtype(weights)
    if isinstance(weights, HfWeights) and weights.is_quantised:
        config.pop("quantization_config", None)
    if dtype:
        config |= dtype_fields(config, written)
    return side_contents(checkpoint.side, written, config)


STATE_FILE = "__1_0.distcp"
# Modules with a Megatron "extra state" in every layer or expert, with or without Transformer Engine.
_LAYER_STATES = """
    self_attention.linear_qkv self_attention.linear_proj self_attention.core_attention self_attention.q_layernorm
    self_attention.k_layernorm input_layernorm pre_mlp_layernorm mlp.linear_fc1 mlp.linear_fc2
    self_attention.linear_q_proj self_attention.linear_q_down_proj self_attention.linear_q_up_proj
    self_attention.linear_kv_down_proj self_attention.linear_kv_up_proj self_attention.in_proj
    self_attention.out_norm self_attention.out_proj self_attention.kv_layernorm mlp.shared_experts.linear_fc1
    mlp.shared_experts.linear_fc2
    """.split()  # noqa: SIM905  # a list of texts is three times as long
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
