"""The files of a Hugging Face checkpoint folder: shards, index, side files, and the headers of safetensors; needs no
torch.

A safetensors file has 8 bytes with the header's length N in little-endian, N bytes of JSON, then the tensors' bytes.
Offsets in the header count from its end.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from grpo_mega.checkpoint_io.slices import ITEM_BYTES
from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.paths import EXPORT_FILE, check_regular, read_json
from grpo_mega.weights.boxes import Index
from grpo_mega.weights.hf_config import SINGLE_ROPE_FIELDS, resolve_config

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
WEIGHT_SUFFIXES = (
    *(".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack"),
    *(".onnx", ".distcp", ".metadata", "metadata.json"),  # the last three are a Megatron checkpoint's
)
ADAPTER_CONFIG = "adapter_config.json"
TEMPLATES = "additional_chat_templates"  # folder of named chat templates
SCALE_SUFFIX = "_scale_inv"  # suffix of a weight's name that names the scales of its FP8 blocks
_MAX_HEADER_BYTES = 100_000_000  # limit of the format
_LAYER = re.compile(r"model\.layers\.\d+\.")
_EXTRA_PARTS = ("mtp.", "model.visual.")
_EXTRA_MARK = "eh_proj.weight"  # joins a token's hidden state and the next token's embedding
_STACKED = re.compile(r"(model\..+\.experts\.)(gate_up|down)_proj")
_OF_EXPERT = re.compile(r"(model\..+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")

Stored = dict[str, tuple[Index, list[str]]]  # tensors of a folder: shape, and names of the parts one below the other


def has_weights(folder: Path) -> bool:
    """Return True if the folder has files with the weights of a model, or an index of them."""
    return any((folder / name).exists() for name in (SINGLE, INDEX, BIN, BIN_INDEX))


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. Raise WeightMappingError if there are none, or a named one is
    missing.
    """
    if (folder / INDEX).exists():
        return weight_shards(folder / INDEX)
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise WeightMappingError(f"{folder} has neither {SINGLE} nor {INDEX}; give a checkpoint with safetensors")


def weight_shards(index: Path) -> list[Path]:
    """Return the files that an index names, in the folder of the index. Raise WeightMappingError.

    A whole file beside the index is refused: transformers reads the whole file, and SGLang the shards.
    """
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        outside = next((name for name in names if Path(name).is_absolute() or ".." in Path(name).parts), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightMappingError(f"{index} is not an index of shards ({error!r}); fetch the file again") from None
    if outside is not None:
        raise WeightMappingError(f"{index} names {outside!r}, outside of its folder; fetch index and shards again")
    single = index.with_name(index.name.removesuffix(".index.json"))
    for name in names:
        if not (index.parent / name).is_file():
            remedy = f", or remove {index.name} if {single.name} has the whole model" if single.is_file() else ""
            raise WeightMappingError(
                f"{index.parent / name} is named by {index.name} but does not exist; fetch the missing shard{remedy}"
            )
    if single.is_file() and names != [single.name]:
        raise WeightMappingError(
            f"{index.parent} holds {single.name}, which transformers reads, and {index.name}, whose shards SGLang"
            f" reads; remove {single.name} to use the shards, or remove {index.name} and its shards"
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


def index_of(shards: Mapping[str, list[str]], num_bytes: Mapping[str, int]) -> dict[str, bytes | Path]:
    """Return the content of the index file by its name; {} for a single file."""
    if len(shards) == 1:
        return {}
    weight_map = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": weight_map}
    return {INDEX: (json.dumps(index, indent=2) + "\n").encode()}


def dtype_fields(config: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """Return the fields of a config that name the tensors' dtype, with torch's name `dtype`."""
    return {name: dtype for name in ("dtype", "torch_dtype") if name in config} or {"dtype": dtype}


def with_old_fields(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Add the rotary embedding's fields of transformers 4 to a config that has only those of transformers 5.

    Without them transformers 4 uses its defaults and does not warn. `dtype`: torch's name of the tensors' dtype, which
    a changed config gets. A config that needs no field stays as it is.
    """
    if not (parameters := config.get("rope_parameters")):
        return dict(config)
    rope = resolve_config(config)["rope_parameters"]
    old = {name: rope[name] for name in SINGLE_ROPE_FIELDS if name in rope}
    if rope.get("rope_type") != "default":
        old["rope_scaling"] = {name: parameters[name] for name in parameters if name not in old}
    added = {name: old[name] for name in old if config.get(name) is None}
    if added:
        added |= dtype_fields(config, dtype)
    return {**config, **added}


def side_contents(folder: Path, dtype: str, config: Mapping[str, Any] | None = None) -> dict[str, bytes | Path]:
    """Return config, generation config, tokenizer and all other files of a model, by name in the folder.

    They are copied byte for byte. Only config.json changes, if transformers 4 needs more fields, or to `config`.
    Weights are left out, and the step of a run's policy too, because it does not describe weights that are converted or
    trained further. `dtype`: torch's name of the tensors' dtype.
    """
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.endswith(WEIGHT_SUFFIXES)]
    files = [p for p in files if p.name not in (ADAPTER_CONFIG, EXPORT_FILE)]
    files += sorted(p for p in folder.glob(f"{TEMPLATES}/*.jinja") if p.is_file())
    contents: dict[str, bytes | Path] = {str(path.relative_to(folder)): path for path in files}
    stored = read_json(folder / "config.json")
    if (changed := with_old_fields(config or stored, dtype)) != stored:
        contents["config.json"] = json.dumps(changed, indent=2).encode() + b"\n"
    return contents


def adapter_problem(folder: Path) -> str | None:
    """Return the problem of a folder that contains an adapter's config; None if it contains none.

    Next to full weights, libraries follow the adapter's config to another base model, so it is unclear which weights
    are meant.
    """
    path = folder / ADAPTER_CONFIG
    if not path.exists():
        return None
    try:
        base = read_json(path).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    if has_weights(folder):
        return (
            f"holds {ADAPTER_CONFIG} next to full weights, so libraries load base_model_name_or_path={base!r} instead; "
            f"remove {ADAPTER_CONFIG} to train the full weights"
        )
    return (
        f"is an adapter of {base or 'another model'}, not a model; merge it into its base first, and name the merged"
        " folder, or name the base and set model.lora and model.adapter"
    )


def extra_names(names: Iterable[str]) -> list[str]:
    """Return the sorted names of the parts that are neither trained nor served among `names`.

    They are layers for multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2), which follow the other
    layers, and the vision tower of a multimodal model. Conversions keep them. An exported policy gets them from its
    source model.
    """
    known = set(names)
    layers = {name: match[0] for name in known if (match := _LAYER.match(name))}
    extra = {name for name, layer in layers.items() if layer + _EXTRA_MARK in known}
    return sorted(extra | {name for name in known if name.startswith(_EXTRA_PARTS)})


def may_have_extra(config: Mapping[str, Any]) -> bool:
    """Return True if a model with this config.json may have such parts."""
    return any(
        config.get(name)
        for name in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "text_config")
    )


def experts_in(name: str, shape: Sequence[int]) -> Iterator[tuple[str, Index, int]]:
    """Yield the experts' tensors that a tensor [experts, rows, columns] stacks: name, shape and first row of each.

    The rows of an expert's up projection follow the rows of its gate projection. Yield nothing for any other tensor.
    """
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3:
        return
    parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
    rows = shape[1] // len(parts)
    for number in range(shape[0] * len(parts)):
        expert, part = divmod(number, len(parts))
        yield f"{match[1]}{expert}.{parts[part]}_proj.weight", (rows, shape[2]), number * rows


def folder_tensors(shapes: Mapping[str, Index], *, stacks_experts: bool) -> Stored:
    """Return the tensors of a folder: by name the shape and the names in `shapes` of its parts, one below the other."""
    stored: Stored = {}
    for name, shape in shapes.items():
        match = _OF_EXPERT.fullmatch(name) if stacks_experts else None
        if match is None:
            stored[name] = shape, [name]
            continue
        whole = f"{match[1]}{'down' if match[3] == 'down' else 'gate_up'}_proj"
        names = [*stored[whole][1], name] if whole in stored else [name]
        num_experts = int(match[2]) + 1
        stored[whole] = (num_experts, len(names) * shape[0] // num_experts, shape[1]), names
    return stored


@dataclass(frozen=True)
class TensorInfo:
    dtype: str  # safetensors name, such as "BF16"
    shape: Index
    offset: int = 0  # offset of the first byte in the file


def read_headers(paths: Sequence[Path]) -> dict[str, tuple[Path, TensorInfo]]:
    """Return each tensor of several files with its file. Raise WeightMappingError."""
    tensors: dict[str, tuple[Path, TensorInfo]] = {}
    for path in paths:
        for name, info in read_header(path).items():
            if name in tensors:
                raise WeightMappingError(
                    f"{path} holds {name}, and so does {tensors[name][0].name}; fetch index and shards again"
                )
            tensors[name] = path, info
    return tensors


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a file. Raise WeightMappingError if it is damaged or has bytes outside of tensors."""
    size = size_of(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise _broken(path, f"its {size} bytes do not hold the header they announce")
        text = file.read(length)
    infos: dict[str, TensorInfo] = {}
    end, before = 0, "the header"
    try:
        header = json.loads(text, object_pairs_hook=_without_repeats)
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: (*item[1]["data_offsets"], item[0])):
            start, stop = entry["data_offsets"]
            info = infos[name] = TensorInfo(entry["dtype"], tuple(entry["shape"]), 8 + length + start)
            num_bytes = prod(info.shape) * ITEM_BYTES[info.dtype] if info.dtype in ITEM_BYTES else stop - start
            if stop - start != num_bytes:
                raise _broken(path, f"its header gives {name} another size than its shape")
            if start < end:
                raise _broken(path, f"its header has {name} overlap {before}")
            if start > end:
                raise _broken(path, f"its header leaves a hole of {start - end} bytes before {name}")
            end, before = stop, name
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _broken(path, f"its header is damaged: {repr(error)[:200]}") from None
    whole = 8 + length + end
    if size < whole:
        raise _broken(path, f"it is cut short: {size} bytes of {whole}")
    if size > whole:
        raise _broken(path, f"it has {size} bytes, but its header describes {whole}")
    return infos


def size_of(path: Path) -> int:
    """Return the size of a file. Raise WeightMappingError unless it is a regular file."""
    try:
        check_regular(path)
    except OSError as error:
        raise _broken(path, str(error.strerror)) from None
    return path.stat().st_size


def header_of(tensors: Iterable[tuple[str, str, Index]]) -> tuple[bytes, list[int]]:
    """Return the header for (name, dtype, shape) in order, and the offset of each tensor in the file."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, []
    for name, dtype, shape in tensors:
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offsets.append(offset)
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + offset for offset in offsets]


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name} occurs twice")
        entries[name] = value
    return entries


def _broken(path: Path, problem: str) -> WeightMappingError:
    return WeightMappingError(f"{path} cannot be read ({problem}); fetch the file again")


def generation_token_ids(folder: Path, field: str) -> set[int]:
    """Return the ids in a field of a generation_config.json; empty without one. Raise ConfigError if it is damaged.

    A negative id stands for no padding or start token.
    """
    path = folder / "generation_config.json"
    value = read_object(path).get(field)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(one) is int and (one >= 0 or field != "eos_token_id") for one in ids):
        raise ConfigError(f"{path}: {field}={value!r:.60} must be one or more token ids; fetch the file again")
    return set(ids)


def check_vocabulary(folder: Path, largest_id: int, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer has an id for which the model has no embedding."""
    if largest_id >= vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size} in {folder / 'config.json'} is less than the tokenizer, whose ids go up to"
            f" {largest_id}; give the tokenizer that belongs to the model"
        )


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object; fetch the file again")
    return value
