"""The files of a Hugging Face checkpoint folder and what must be in them; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from grpo_mega.errors import WeightMappingError
from grpo_mega.files import read_json
from grpo_mega.formats.dtypes import ITEM_BYTES
from grpo_mega.formats.extra_layers import extra_names
from grpo_mega.formats.safetensors_files import TensorInfo
from grpo_mega.weights.boxes import Index

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".distcp", ".metadata", "metadata.json"),  # a Megatron checkpoint with Hugging Face's other files beside it
)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
TEMPLATES = "additional_chat_templates"  # a folder of named chat templates
SCALE_SUFFIX = "_scale_inv"  # follows a weight's name in that of the scales of its FP8 blocks
_BLOCK_BYTES = 8 << 20


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. Raise WeightMappingError if there are none, or a named one is missing."""
    if (folder / INDEX).exists():
        return shards_of(folder / INDEX)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise WeightMappingError(f"{folder} has neither {SINGLE} nor {INDEX}; give a checkpoint with safetensors")


def shards_of(index: Path) -> list[Path]:
    """Return the files that an index names, which lie beside it. Raise WeightMappingError."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        outside = next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightMappingError(f"{index} is no index of shards ({error!r}); fetch the file again") from None
    if outside is not None:
        raise WeightMappingError(f"{index} names {outside!r}, outside of its folder; fetch index and shards again")
    for name in names:
        if not (index.parent / name).is_file():
            raise WeightMappingError(
                f"{index.parent / name} is named by {index.name} but does not exist; fetch the missing shard"
            )
    return [index.parent / name for name in names]


def split_into_shards(num_bytes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """Split tensors, in order, into files of at most `max_shard_bytes`; a larger tensor gets its own. Return names by file."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in num_bytes.items():
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards)}


def index_of(shards: Mapping[str, list[str]], num_bytes: Mapping[str, int]) -> dict[str, bytes]:
    """Return the index file of shards by its name; nothing for a single file."""
    if len(shards) == 1:
        return {}
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": weight_map}
    return {INDEX: (json.dumps(index, indent=2) + "\n").encode()}


def side_files(folder: Path) -> list[Path]:
    """Return config, generation config, tokenizer and all other files of a model but its weights."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.endswith(WEIGHT_SUFFIXES)]
    files = [p for p in files if p.name not in ADAPTER_FILES]
    return [*files, *sorted(p for p in folder.glob(f"{TEMPLATES}/*.jinja") if p.is_file())]


def adapter_problem(folder: Path) -> str | None:
    """Return what is wrong with a folder that holds an adapter's config; None if it holds none.

    Beside weights, libraries follow it to another base model, so it cannot be told what the weights are.
    """
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        return None
    try:
        base = read_json(path).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    if any((folder / name).exists() for name in (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")):
        return (
            f"holds {ADAPTER_CONFIG} beside full weights, with which libraries load base_model_name_or_path={base!r} instead; "
            f"remove {ADAPTER_CONFIG} if the weights are those to train"
        )
    return f"is an adapter of {base or 'another model'}, not a model; merge it into its base first, and name the merged folder"


def check_shapes(folder: Path, shapes: Mapping[str, Index], expected: Mapping[str, Index]) -> None:
    """Raise WeightMappingError for the first tensor that is missing, has a wrong shape, or is not known."""
    for name, shape in expected.items():
        if name not in shapes and (prefix := _prefix_of(name, shapes)) is not None:
            raise WeightMappingError(
                f"{folder} holds {prefix + name.removeprefix('model.')!r} where {name!r} is read: its names have the prefix "
                f"{prefix!r} of a model with more parts, such as vision; save its language model alone, and name that folder"
            )
        if name not in shapes:
            raise WeightMappingError(f"{folder} has no tensor {name!r}; fetch the checkpoint again, it is incomplete")
        if shapes[name] != tuple(shape):
            raise WeightMappingError(
                f"{folder}: {name} has shape {list(shapes[name])}, but config.json means {list(shape)}; "
                "give the config.json that belongs to these weights"
            )
    # A tied output layer may be stored as well; rotary tables are derived.
    known = {*expected, "lm_head.weight", *extra_names(shapes)}
    for name in sorted(set(shapes) - known):
        if name.endswith(SCALE_SUFFIX):
            raise WeightMappingError(
                f"{folder} is quantised to FP8 in blocks (it holds {name!r}), and only plain weights can be trained; "
                f"write those by tools/convert_hf_to_mcore.py {folder} OUT, and set model.path=OUT"
            )
        if not name.endswith("rotary_emb.inv_freq"):
            raise WeightMappingError(
                f"{folder} holds {name!r}, which its model type has no place for; check model_type in config.json"
            )


def _prefix_of(name: str, names: Iterable[str]) -> str | None:
    """Return what stands in place of "model." before a tensor's name among others; None if it is not there at all."""
    bare = name.removeprefix("model.")
    return next((other.removesuffix(bare) for other in names if other.endswith(f".{bare}")), None)


def check_tied(folder: Path, output: str, embedding: str, tensors: Mapping[str, tuple[Path, TensorInfo]]) -> None:
    """Raise WeightMappingError for a stored output layer that is not the embedding, though config.json ties them.

    Training would drop it without a word; transformers loads such a model with both.
    """
    if output in tensors and not _same_bytes(tensors[output], tensors[embedding]):
        raise WeightMappingError(
            f"{folder}: {output} is not {embedding}, though config.json has tie_word_embeddings=true; set it to false"
        )


def _same_bytes(a: tuple[Path, TensorInfo], b: tuple[Path, TensorInfo]) -> bool:
    """Return True if two tensors have the same dtype, shape and bits; read block by block."""
    (path, info), (other_path, other) = a, b
    if (info.dtype, info.shape) != (other.dtype, other.shape):
        return False
    left = prod(info.shape) * ITEM_BYTES[info.dtype]
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(info.offset)
        other_file.seek(other.offset)
        while left > 0:
            size = min(left, _BLOCK_BYTES)
            if file.read(size) != other_file.read(size):
                return False
            left -= size
    return True
