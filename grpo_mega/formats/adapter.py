"""PEFT's folders of LoRA adapters: adapter_config.json and adapter_model.safetensors. All but `check` needs torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mega.config import LoraConfig, ModelConfig
from grpo_mega.errors import ConfigError
from grpo_mega.formats.hf_files import (
    ADAPTER_CONFIG,
    extra_names,
    folder_tensors,
    index_of,
    read_headers,
    side_contents,
    split_into_shards,
)
from grpo_mega.formats.slices import FROM_TORCH
from grpo_mega.paths import read_json
from grpo_mega.weights.boxes import Box, Index, whole
from grpo_mega.weights.derived import adapter_family, adapter_name, module_names
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import FLOAT32, Family, ModelShape, read_config

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARD_BYTES = 5 << 30
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields of adapter_config.json that change what an adapter computes, and their only values here. null is the same,
# except for the type.
_PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "use_rslora": False,
    "use_dora": False,
    "lora_dropout": 0,
    "bias": "none",
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": [],
    "target_parameters": [],
    "layers_to_transform": [],
}


def check(folder: Path, lora: LoraConfig, tensors: Mapping[str, Index]) -> None:
    """Raise ConfigError unless the folder has an adapter of these numbers. `tensors`: its names and shapes."""
    name = f"model.adapter={folder}"
    try:
        config = read_json(folder / ADAPTER_CONFIG)
        stored = {n.removeprefix(_PREFIX): info.shape for n, (_, info) in read_headers([folder / WEIGHTS]).items()}
        for field, needed in _PLAIN.items():
            value = config.get(field)
            if value != needed and (value is not None or field == "peft_type"):
                raise ConfigError(f"{name}: its {field}={value!r}: must be {needed!r}; train such an adapter again")
        for field, key, ours in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
            if config[field] != ours:
                raise ConfigError(f"{name}: its {field}={config[field]} is not model.lora.{key}={ours:g}; set that")
    except (OSError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(f"{name} is no folder of a PEFT adapter ({error}); name one") from None
    for tensor in sorted(stored.keys() | tensors.keys()):
        if stored.get(tensor) != tensors.get(tensor):
            raise ConfigError(
                f"{name}: {tensor} has shape {stored.get(tensor)}, but model.path and model.lora.targets mean"
                f" {tensors.get(tensor)}; correct one of them"
            )


def read(folder: Path) -> Callable[[Box], Tensor]:
    """Return a function that reads slices of the adapter's tensors by their Hugging Face names."""
    from safetensors import safe_open

    file = safe_open(folder / WEIGHTS, framework="pt")

    def read_box(box: Box) -> Tensor:
        (row, column), (last_row, last_column) = box.start, box.stop
        return file.get_slice(_PREFIX + box.tensor)[row:last_row, column:last_column]

    return read_box


def write(folder: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, family: Family, base: Path) -> None:
    """Write the tensors, by their Hugging Face names, as an adapter of `base`. `family` is the adapter's.

    The folder appears, or is replaced, only when it is complete.
    """
    from safetensors.torch import save_file

    from grpo_mega.formats.output import make_partial, publish_folder

    partial = make_partial(folder)
    named = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, partial / WEIGHTS, metadata={"format": "pt"})
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "inference_mode": True,
        "target_modules": module_names(family),
    }
    shutil.rmtree(folder, ignore_errors=True)
    publish_folder(partial, folder, {ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()})


def export(state: Path, out: Path, model: ModelConfig, *, is_merged: bool) -> None:
    """Write the adapter in a checkpoint's state as a PEFT folder, or its base with the adapter merged into it."""
    from grpo_mega.formats.megatron_weights import MegatronWeights
    from grpo_mega.formats.reader import CheckpointReader

    assert model.lora is not None
    shape = ModelShape.from_hf_config(read_config(model.path))
    base = family_of(shape.model_type)
    family = adapter_family(base, shape, model.lora.rank, model.lora.targets)
    with CheckpointReader(MegatronWeights(state, family, shape)) as saved:
        tensors = {name: saved.read(whole(name, size)) for name, size in family.hf_tensors(shape).items()}
    if is_merged:
        _merge(out, model, base, shape, tensors)
    else:
        write(out, tensors, model.lora, family, model.path)


def _merge(out: Path, model: ModelConfig, family: Family, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Write W + alpha / rank B A, computed in fp32, for each weight W of the base, in model.dtype."""
    from safetensors.torch import save_file

    from grpo_mega.formats.output import make_partial, publish_folder
    from grpo_mega.formats.reader import joined, open_reader, torch_dtype

    assert model.lora is not None
    partial, scale = make_partial(out), model.lora.alpha / model.lora.rank
    dtype = torch_dtype(FROM_TORCH[model.resolved_dtype])
    with open_reader(model.path, family, shape) as base:
        sizes = family.hf_tensors(shape) | {name: base.shape(name) for name in extra_names(base.names)}
        stored = folder_tensors(sizes, stacks_experts=family.stacks_experts)
        num_bytes = {name: sum(map(base.num_bytes, parts)) for name, (_, parts) in stored.items()}
        shards = split_into_shards(num_bytes, MAX_SHARD_BYTES)
        for file, chosen in shards.items():
            content = {}
            for name in (part for one in chosen for part in stored[one][1]):
                weight = base.read(whole(name, base.shape(name)))
                # The policy's dtypes: layers that it leaves out keep theirs.
                if name in family.hf_tensors(shape):
                    weight = weight.float() if name.endswith(FLOAT32) else weight.to(dtype)
                if (a := tensors.get(adapter_name(name, "A"))) is not None:
                    added = scale * (tensors[adapter_name(name, "B")].float() @ a.float())
                    weight = (weight.float() + added).to(dtype)
                content[name] = weight.contiguous()
            content = joined(content, {name: stored[name] for name in chosen})
            save_file(content, partial / file, metadata={"format": "pt"})
    publish_folder(partial, out, side_contents(model.path) | index_of(shards, num_bytes))
