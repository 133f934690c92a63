"""The files of a Hugging Face checkpoint folder and the tensors they must contain; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

from grpo_mega.errors import WeightMappingError
from grpo_mega.formats.dtypes import ITEM_BYTES
from grpo_mega.formats.extra_layers import extra_names
from grpo_mega.formats.safetensors_files import TensorInfo
from grpo_mega.paths import read_json
from grpo_mega.weights.boxes import Index

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"),
    *(".distcp", ".metadata", "metadata.json"),  # for a Megatron checkpoint next to Hugging Face files
)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")
TEMPLATES = "additional_chat_templates"  # folder of named chat templates
SCALE_SUFFIX = "_scale_inv"  # suffix of a weight's name that names the scales of its FP8 blocks
_BLOCK_BYTES = 8 << 20


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. Raise WeightMappingError if there are none, or a named one is missing."""
    if (folder / INDEX).exists():
        return shards_of(folder / INDEX)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise WeightMappingError(f"{folder} has neither {SINGLE} nor {INDEX}; give a checkpoint with safetensors")


def shards_of(index: Path) -> list[Path]:
    """Return the files that an index names, in the folder of the index. Raise WeightMappingError."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        outside = next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightMappingError(f"{index} is not an index of shards ({error!r}); fetch the file again") from None
    if outside is not None:
        raise WeightMappingError(f"{index} names {outside!r}, outside of its folder; fetch index and shards again")
    for name in names:
        if not (index.parent / name).is_file():
            raise WeightMappingError(
                f"{index.parent / name} is named by {index.name} but does not exist; fetch the missing shard"
            )
    return [index.parent / name for name in names]


def split_into_shards(num_bytes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """Split tensors, in order, into files of at most `max_shard_bytes`. Return tensor names by file.

    A larger tensor gets a separate file.
    """
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
    """Return the content of the index file by its name; {} for a single file."""
    if len(shards) == 1:
        return {}
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": weight_map}
    return {INDEX: (json.dumps(index, indent=2) + "\n").encode()}


def side_files(folder: Path) -> list[Path]:
    """Return config, generation config, tokenizer and all other files of a model except its weights."""
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.endswith(WEIGHT_SUFFIXES)]
    files = [p for p in files if p.name not in ADAPTER_FILES]
    return [*files, *sorted(p for p in folder.glob(f"{TEMPLATES}/*.jinja") if p.is_file())]


def adapter_problem(folder: Path) -> str | None:
    """Return the problem of a folder that contains an adapter's config; None if it contains none.

    Next to full weights, libraries follow the adapter's config to another base model, so it is unclear which weights are meant.
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
            f"holds {ADAPTER_CONFIG} next to full weights, so libraries load base_model_name_or_path={base!r} instead; "
            f"remove {ADAPTER_CONFIG} to train the full weights"
        )
    return f"is an adapter of {base or 'another model'}, not a model; merge it into its base first, and name the merged folder"


def check_shapes(folder: Path, shapes: Mapping[str, Index], expected: Mapping[str, Index]) -> None:
    """Raise WeightMappingError for the first tensor that is missing, unknown, or has a wrong shape."""
    for name, shape in expected.items():
        if name not in shapes and (prefix := _prefix_of(name, shapes)) is not None:
            raise WeightMappingError(
                f"{folder} holds {prefix + name.removeprefix('model.')!r} instead of {name!r}: its names have the prefix "
                f"{prefix!r} of a model with more parts, such as vision; save its language model alone, and name that folder"
            )
        if name not in shapes:
            raise WeightMappingError(f"{folder} has no tensor {name!r}; fetch the checkpoint again, it is incomplete")
        if shapes[name] != tuple(shape):
            raise WeightMappingError(
                f"{folder}: {name} has shape {list(shapes[name])}, but config.json means {list(shape)}; "
                "give the config.json that belongs to these weights"
            )
    # A tied output layer may be stored too. Rotary tables are derived from the config.
    known = {*expected, "lm_head.weight", *extra_names(shapes)}
    for name in sorted(set(shapes) - known):
        if name.endswith(SCALE_SUFFIX):
            raise WeightMappingError(
                f"{folder} is quantised to FP8 in blocks (it holds {name!r}), and only plain weights can be trained; "
                f"write plain weights with tools/convert_hf_to_mcore.py {folder} OUT, and set model.path=OUT"
            )
        if not name.endswith("rotary_emb.inv_freq"):
            raise WeightMappingError(f"{folder} holds {name!r}, unknown to its model type; check model_type in config.json")


def _prefix_of(name: str, names: Iterable[str]) -> str | None:
    """Return the prefix that replaces "model." before a tensor's name among the names; None if the tensor is missing."""
    bare = name.removeprefix("model.")
    return next((other.removesuffix(bare) for other in names if other.endswith(f".{bare}")), None)


def check_tied(folder: Path, output: str, embedding: str, tensors: Mapping[str, tuple[Path, TensorInfo]]) -> None:
    """Raise WeightMappingError if a stored output layer differs from the embedding, although config.json ties them.

    Training would silently drop the output layer, while transformers loads such a model with both.
    """
    if output in tensors and not _same_bytes(tensors[output], tensors[embedding]):
        raise WeightMappingError(
            f"{folder}: {output} is not {embedding}, though config.json has tie_word_embeddings=true; set it to false"
        )


def _same_bytes(a: tuple[Path, TensorInfo], b: tuple[Path, TensorInfo]) -> bool:
    """Return True if two tensors have the same dtype, shape and bits. Reads block by block."""
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
