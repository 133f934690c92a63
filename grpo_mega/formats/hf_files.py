"""The files of a Hugging Face checkpoint folder and what must be in them; needs no torch.

`check_folder` tells from the files' headers alone whether a checkpoint is whole and is the model's, so before anything starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.safetensors_header import ITEM_BITS, TensorInfo, read_header
from grpo_mega.weights.boxes import Index

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".distcp", ".metadata", "metadata.json"),  # a Megatron checkpoint with Hugging Face's other files beside it
)
SCALE_SUFFIX = "_scale_inv"  # after a weight's name: the scales of its FP8 blocks
_BLOCK_BYTES = 8 << 20
DTYPES = ("F32", "BF16", "F16", "F64")  # of weights that can be trained


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises WeightMappingError if there are none, or one named by the index is missing."""
    if (folder / INDEX).exists():
        return shards_of(folder / INDEX)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise WeightMappingError(f"{folder} has neither {SINGLE} nor {INDEX}; give a checkpoint with safetensors")


def shards_of(index: Path) -> list[Path]:
    """Return the files that an index names, which lie beside it. Raises WeightMappingError."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        outside = next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightMappingError(f"{index} is no index of shards ({error!r}); fetch the file again") from None
    if outside is not None:
        raise WeightMappingError(f"{index} names {outside!r}, outside of its folder; fetch index and shards again")
    for name in names:
        if not (index.parent / name).is_file():
            raise WeightMappingError(
                f"{index.parent / name} is named by {index.name} but does not exist; fetch the missing shard"
            )
    return [index.parent / name for name in names]


def side_files(folder: Path) -> list[Path]:
    """Config, generation config, tokenizer and whatever else belongs to a model but its weights."""
    return [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.endswith(WEIGHT_SUFFIXES)]


def check_folder(folder: Path, expected: Mapping[str, Index]) -> None:
    """Raises WeightMappingError if the folder's safetensors are damaged or do not hold the tensors of `expected`."""
    infos = {name: info for name, (_, info) in read_headers(weight_files(folder)).items()}
    check_shapes(folder, {name: info.shape for name, info in infos.items()}, expected)
    for name in expected:
        if infos[name].dtype not in DTYPES:
            raise WeightMappingError(
                f"{folder}: {name} has dtype {infos[name].dtype}, but weights that train have one of {', '.join(DTYPES)}; "
                "give a checkpoint that is not quantized"
            )


def read_headers(paths: Sequence[Path]) -> dict[str, tuple[Path, TensorInfo]]:
    """Return each tensor of several files and the file that holds it. Raises WeightMappingError."""
    found: dict[str, tuple[Path, TensorInfo]] = {}
    for path in paths:
        for name, info in read_header(path).items():
            if name in found:
                raise WeightMappingError(
                    f"{path} holds {name}, and so does {found[name][0].name}; fetch index and shards again"
                )
            found[name] = path, info
    return found


def check_tied(folder: Path, output: str, embedding: str) -> None:
    """Raises WeightMappingError for a stored output layer that is not the embedding, though config.json ties them.

    Training would drop it without a word; transformers loads such a model with both.
    """
    places = read_headers(weight_files(folder))
    if output in places and not _same_bytes(places[output], places[embedding]):
        raise WeightMappingError(
            f"{folder}: {output} is not {embedding}, though config.json has tie_word_embeddings=true; set it to false"
        )


def _same_bytes(a: tuple[Path, TensorInfo], b: tuple[Path, TensorInfo]) -> bool:
    """Return whether two tensors have the same dtype, shape and bits; read block by block."""
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
        if name.endswith(SCALE_SUFFIX):
            raise WeightMappingError(
                f"{folder} is quantised to FP8 in blocks (it holds {name!r}), and only plain weights can be trained; "
                f"write those by tools/convert_hf_to_mcore.py {folder} OUT, and set model.path=OUT"
            )
        if not name.endswith("rotary_emb.inv_freq"):
            raise WeightMappingError(
                f"{folder} holds {name!r}, which its model type has no place for; check model_type in config.json"
            )
