"""PEFT's folders of LoRA adapters: adapter_config.json and adapter_model.safetensors. Only `read` and `write` need torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mega.config import LoraConfig
from grpo_mega.errors import ConfigError
from grpo_mega.formats.hf_files import ADAPTER_CONFIG, read_headers
from grpo_mega.paths import read_json
from grpo_mega.weights.boxes import Box, Index
from grpo_mega.weights.lora import module_names
from grpo_mega.weights.spec import Family

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields of adapter_config.json that change what an adapter computes, and their only values here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "lora_dropout": (0, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "target_parameters": ([], None),
    "layers_to_transform": ([], None),
}


def check(folder: Path, lora: LoraConfig, tensors: Mapping[str, Index]) -> None:
    """Raise ConfigError unless the folder has an adapter of these numbers. `tensors`: the adapter's names and shapes."""
    name = f"model.adapter={folder}"
    try:
        config = read_json(folder / ADAPTER_CONFIG)
        stored = {n.removeprefix(_PREFIX): info.shape for n, (_, info) in read_headers([folder / WEIGHTS]).items()}
        for field, allowed in _PLAIN.items():
            if (value := config.get(field)) not in allowed:
                raise ConfigError(f"{name}: its {field}={value!r}: must be {allowed[0]!r}; train such an adapter again")
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
    """Write the tensors, by their Hugging Face names, as an adapter of `base`. `family` is the adapter's."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    named = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    alpha = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": lora.rank},
        **{"lora_alpha": alpha, "lora_dropout": 0.0, "use_rslora": False, "bias": "none", "inference_mode": True},
        "target_modules": module_names(family),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
