"""Plans of what is written where: a Megatron distributed checkpoint, or the shards of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.formats.dcp_read import COMMON, FORMAT, METADATA
from grpo_mega.formats.dcp_write import SavedPiece, common_bytes, extra_states, metadata_bytes, no_state
from grpo_mega.formats.detect import Checkpoint
from grpo_mega.formats.dtypes import ITEM_BYTES, TORCH_NAMES
from grpo_mega.formats.hf_files import INDEX, SINGLE, check_shapes, side_files
from grpo_mega.formats.hf_weights import HfWeights
from grpo_mega.formats.megatron_names import Stored, stored_tensors
from grpo_mega.formats.megatron_weights import MegatronWeights
from grpo_mega.formats.output import Item, OutputPlan
from grpo_mega.formats.slices import Target, target_of
from grpo_mega.formats.sources import whole
from grpo_mega.formats.torch_save import blob_of
from grpo_mega.weights.boxes import Index, Piece

_FILE_BYTES = 8 << 30  # at about this size another file is begun; a rank reads only those that it needs
_ALIGNMENT = 64
_FORMAT = {  # what Megatron's metadata.json says
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def megatron_plan(checkpoint: Checkpoint, weights: HfWeights, dtype: str | None) -> OutputPlan:
    """A Megatron distributed checkpoint of a Hugging Face folder. `dtype` None: the tensors' own.

    Raises WeightMappingError if the folder does not hold the tensors that its config.json means.
    """
    family, shape = checkpoint.model()
    check_shapes(checkpoint.side, weights.shapes(), family.hf_tensors(shape))
    items, saved, offset = [], [], 0
    sizes: dict[str, int] = {}
    for stored in stored_tensors(family, shape):
        for piece in saved_pieces(stored):
            target = target_of(piece.name, piece.shape, piece.pieces, weights, dtype)
            blob = blob_of(target.dtype, (1,) * len(stored.place) + piece.shape)
            if offset > _FILE_BYTES or not sizes:
                offset, file = 0, f"__0_{len(sizes)}.distcp"
            items.append(Item(file, offset, target, blob.prefix, blob.suffix, blob.crc_offsets))
            start = (*stored.place, piece.row, *(0,) * (len(piece.shape) - 1))
            chunk = (1,) * len(stored.place) + piece.shape
            full = (*stored.stack, *stored.tensor.shape)
            saved.append(SavedPiece(stored.keys, full, start, chunk, target.dtype, file, offset, blob.size))
            offset += -(-blob.size // _ALIGNMENT) * _ALIGNMENT
            sizes[file] = offset
    last: dict[str, bytes | Path] = {path.name: path for path in side_files(checkpoint.side)}
    last |= _changed_config(checkpoint, was_quantised=weights.is_quantised, dtype=dtype)
    state = no_state()
    last |= {
        COMMON: common_bytes(),
        state.file: state.content,
        METADATA: metadata_bytes(saved, extra_states(shape), state),
        FORMAT: json.dumps(_FORMAT).encode(),
    }
    return OutputPlan(sizes, items, {}, last, weights.files, f"to Megatron {dtype}")


@dataclass(frozen=True)
class PieceToSave:
    """Rows of a stored tensor that are saved as one, from `row` on. `name`: of what it consists."""

    name: str
    row: int
    shape: Index
    pieces: tuple[Piece, ...]


def saved_pieces(stored: Stored) -> list[PieceToSave]:
    """Gate and up projections are saved each for itself, as Megatron does; interleaved heads are not."""
    tensor = stored.tensor
    if len(tensor.pieces) != 2:
        name = ", ".join(dict.fromkeys(p.box.tensor for p in tensor.pieces))
        return [PieceToSave(name, 0, tensor.shape, tensor.pieces)]
    return [
        PieceToSave(p.box.tensor, p.offset[0], p.box.shape, (Piece(p.box, "", (0,) * len(p.offset)),)) for p in tensor.pieces
    ]


def hf_plan(checkpoint: Checkpoint, weights: MegatronWeights, max_shard_bytes: int, dtype: str | None) -> OutputPlan:
    """The Hugging Face folder of a Megatron checkpoint, in the order of the family's table."""
    targets = []
    for name, shape in weights.shapes().items():
        box = whole(name, shape)
        targets.append((shape, target_of(name, shape, (Piece(box, "", box.start),), weights, dtype)))
    shards = _shards(targets, max_shard_bytes)
    items, headers, sizes = [], {}, {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        headers[file], offsets = _safetensors_header(shard)
        for (_, target), offset in zip(shard, offsets, strict=True):
            items.append(Item(file, offset, target))
            weight_map[target.name] = file
        sizes[file] = offsets[-1] + shard[-1][1].num_bytes
    last: dict[str, bytes | Path] = {path.name: path for path in side_files(checkpoint.side)}
    last |= _changed_config(checkpoint, was_quantised=False, dtype=dtype)
    if len(shards) > 1:
        total = sum(target.num_bytes for _, target in targets)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        last[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
    return OutputPlan(sizes, items, headers, last, weights.files, f"to Hugging Face {max_shard_bytes} {dtype}")


_Shaped = tuple[Index, Target]


def _shards(targets: Sequence[_Shaped], max_bytes: int) -> list[list[_Shaped]]:
    """In order, each of at most `max_bytes` unless it is one tensor; within a shard wider elements come first, so that all
    are aligned."""
    found: list[list[_Shaped]] = [[]]
    used = 0
    for pair in targets:
        if found[-1] and used + pair[1].num_bytes > max_bytes:
            found.append([])
            used = 0
        found[-1].append(pair)
        used += pair[1].num_bytes
    return [sorted(shard, key=lambda pair: -ITEM_BYTES[pair[1].dtype]) for shard in found]


def _safetensors_header(shard: Sequence[_Shaped]) -> tuple[bytes, list[int]]:
    """The header, and where in the file each tensor begins."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, []
    for shape, target in shard:
        offsets.append(offset)
        entries[target.name] = {
            "dtype": target.dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + target.num_bytes],
        }
        offset += target.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + o for o in offsets]


def _changed_config(checkpoint: Checkpoint, *, was_quantised: bool, dtype: str | None) -> dict[str, bytes]:
    """config.json, if it would not be true of the output: weights that are not quantised any more, or of another dtype."""
    config = checkpoint.config()
    changed = dict(config)
    if was_quantised:
        changed.pop("quantization_config", None)
    if dtype is not None:
        name = "torch_dtype" if "torch_dtype" in config else "dtype"
        changed[name] = TORCH_NAMES[dtype]
    return {} if changed == config else {"config.json": (json.dumps(changed, indent=2) + "\n").encode()}
