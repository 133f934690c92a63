"""The files of a Hugging Face checkpoint folder and what must be in them; needs no torch.

`check_folder` tells from the files' headers alone whether a checkpoint is whole and is the model's, so before anything starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.boxes import Index
from grpo_mega.weights.safetensors_header import ITEM_BITS, TensorInfo, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".distcp", ".metadata", "metadata.json"),  # a Megatron checkpoint with Hugging Face's other files beside it
)
_BLOCK_BYTES = 8 << 20
DTYPES = ("F32", "BF16", "F16", "F64")  # of weights that can be trained


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises WeightMappingError if there are none, or one named by the index is missing."""
    index = folder / INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightMappingError(f"{index} is no index of shards ({error!r}); fetch the file again") from None
    elif (folder / SINGLE).exists():
        names = [SINGLE]
    else:
        raise WeightMappingError(f"{folder} has neither {SINGLE} nor {INDEX}; give a checkpoint with safetensors")
    for name in names:
        if not (folder / name).exists():
            raise WeightMappingError(f"{folder / name} is named by {INDEX} but does not exist; fetch the missing shard")
    return [folder / name for name in names]


def side_files(folder: Path) -> list[Path]:
    """Config, generation config, tokenizer and whatever else belongs to a model but its weights."""
    return [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.endswith(WEIGHT_SUFFIXES)]


def check_folder(folder: Path, expected: Mapping[str, Index]) -> None:
    """Raises WeightMappingError if the folder's safetensors are damaged or do not hold the tensors of `expected`."""
    infos: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        infos |= read_header(path)
    check_shapes(folder, {name: info.shape for name, info in infos.items()}, expected)
    for name in expected:
        if infos[name].dtype not in DTYPES:
            raise WeightMappingError(
                f"{folder}: {name} has dtype {infos[name].dtype}, but weights that train have one of {', '.join(DTYPES)}; "
                "give a checkpoint that is not quantized"
            )


def check_tied(folder: Path, output: str, embedding: str) -> None:
    """Raises WeightMappingError for a stored output layer that is not the embedding, though config.json ties them.

    Training would drop it without a word; transformers loads such a model with both.
    """
    places = {name: (path, info) for path in weight_files(folder) for name, info in read_header(path).items()}
    if output in places and not _same_bytes(places[output], places[embedding]):
        raise WeightMappingError(
            f"{folder}: {output} is not {embedding}, though config.json has tie_word_embeddings=true; set it to false"
        )


def _same_bytes(a: tuple[Path, TensorInfo], b: tuple[Path, TensorInfo]) -> bool:
    """Whether two tensors have the same dtype, shape and bits; read block by block."""
    (path, info), (other_path, other) = a, b
    if (info.dtype, info.shape) != (other.dtype, other.shape):
        return False
    left = math.prod(info.shape) * ITEM_BITS[info.dtype] // 8
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(info.offset)
        other_file.seek(other.offset)
        while left > 0:
            size = min(left, _BLOCK_BYTES)
            if file.read(size) != other_file.read(size):
                return False
            left -= size
    return True


def check_shapes(folder: Path, found: Mapping[str, Index], expected: Mapping[str, Index]) -> None:
    """Raises WeightMappingError for the first tensor that is missing, has a wrong shape, or is not known."""
    for name, shape in expected.items():
        if name not in found:
            raise WeightMappingError(f"{folder} has no tensor {name!r}; fetch the checkpoint again, it is incomplete")
        if found[name] != tuple(shape):
            raise WeightMappingError(
                f"{folder}: {name} has shape {list(found[name])}, but config.json means {list(shape)}; "
                "give the config.json that belongs to these weights"
            )
    # A tied output layer may be stored as well; rotary tables are derived.
    known = set(expected) | {"lm_head.weight"}
    for name in sorted(set(found) - known):
        if not name.endswith("rotary_emb.inv_freq"):
            raise WeightMappingError(
                f"{folder} holds {name!r}, which its model type has no place for; check model_type in config.json"
            )
