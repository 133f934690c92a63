"""PEFT's folders of LoRA adapters: adapter_config.json and adapter_model.safetensors. All but `check` needs torch.

PEFT adapts the experts of a layer as two stacks: gate and up, and down. If a folder has an A and a B for each matrix of
each expert, PEFT stacks them itself, but only if the base's files have its experts one by one. Other folders contain
the stacks. An expert's gate and up are blocks on the diagonal of an adapter with twice the rank.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_mega.checkpoint_io.hf_files import (
    ADAPTER_CONFIG,
    extra_names,
    folder_tensors,
    index_of,
    read_headers,
    side_contents,
    split_into_shards,
)
from grpo_mega.checkpoint_io.slices import FROM_TORCH
from grpo_mega.config import LoraConfig, ModelConfig
from grpo_mega.errors import ConfigError
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
_NEUTRAL = frozenset(  # fields of adapter_config.json that do not change what an adapter computes
    """
    auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules inference_mode layers_pattern
    lora_alpha megatron_core peft_version qalora_group_size r revision runtime_config target_modules
    target_parameters task_type
    """.split()  # noqa: SIM905
)
_ALLOWED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_dropout": (0,),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.(lora_[AB]\.weight)")
_GATE_UP, _DOWN = "experts.gate_up_proj", ("down_proj", "w2")
# The place of a matrix in its stack.
_PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1} | dict.fromkeys(_DOWN, 0)


def check(folder: Path, lora: LoraConfig, tensors: Mapping[str, Index]) -> None:
    """Raise ConfigError unless the folder has an adapter of these numbers. `tensors`: its names and shapes."""
    name, patterns = f"model.adapter={folder}", _patterns(lora)
    try:
        config = read_json(folder / ADAPTER_CONFIG)
        stored = {n.removeprefix(_PREFIX): info.shape for n, (_, info) in read_headers([folder / WEIGHTS]).items()}
        for field, value in ({"peft_type": None} | config).items():
            allowed = _ALLOWED.get(field, (patterns.get(field),))
            is_off = repr(value) in ("None", "False", "[]", "{}") and field != "peft_type"
            if not is_off and field not in _NEUTRAL and value not in allowed:
                raise ConfigError(
                    f"{name}: its {field}={repr(value)[:99]} may change what it computes; merge it into model.path"
                    " with PEFT, or train a plain adapter"
                )
        for field, key, ours in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
            if config[field] != ours:
                raise ConfigError(f"{name}: its {field}={config[field]} is not model.lora.{key}={ours:g}; set that")
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(f"{name} is no folder of a PEFT adapter ({error}); name one") from None
    if any(".experts.lora_" in tensor for tensor in stored):
        tensors = _stack_sizes(tensors)
    for tensor in sorted(stored.keys() | tensors.keys()):
        if stored.get(tensor) != tensors.get(tensor):
            raise ConfigError(
                f"{name}: {tensor} has shape {stored.get(tensor)}, but model.path and model.lora.targets mean"
                f" {tensors.get(tensor)}; correct one of them"
            )


def read(folder: Path) -> Callable[[Box], Tensor]:
    """Return a function that reads slices of the adapter's tensors by their Hugging Face names."""
    from safetensors import safe_open

    file, rank = safe_open(folder / WEIGHTS, framework="pt"), read_json(folder / ADAPTER_CONFIG)["r"]
    names = {name.removeprefix(_PREFIX) for name in file.keys()}  # noqa: SIM118, it is no dict

    @lru_cache(maxsize=1)
    def read_stack(name: str, num_places: int) -> Tensor:
        stack = file.get_tensor(_PREFIX + name)
        matrices = _matrices(name, stack, num_places, rank)
        if matrices.count_nonzero() != stack.count_nonzero():
            raise ConfigError(
                f"model.adapter={folder}: {name} mixes gate and up of an expert; merge it into model.path with PEFT"
            )
        return matrices

    def read_box(box: Box) -> Tensor:
        (row, column), (last_row, last_column) = box.start, box.stop
        if box.tensor in names:
            return file.get_slice(_PREFIX + box.tensor)[row:last_row, column:last_column]
        name, num_places, expert, place = _stack_of(box.tensor, names)
        return read_stack(name, num_places)[expert, row:last_row, column:last_column, place]

    return read_box


def write(folder: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, family: Family, base: Path) -> None:
    """Write the tensors, by their Hugging Face names, as an adapter of `base`. `family` is the adapter's.

    The folder appears, or is replaced, only when it is complete.
    """
    from safetensors.torch import save_file

    from grpo_mega.checkpoint_io.output import make_partial, publish_folder

    partial = make_partial(folder)
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
    if matrices := {found[3] for found in map(_EXPERT.fullmatch, tensors) if found}:
        # PEFT takes a target such as up_proj for a matrix of experts. Matrices of other layers need their full names.
        stems = [name.removesuffix(".lora_A.weight") for name in tensors if not _EXPERT.fullmatch(name)]
        plain = sorted(f"layers.{s.partition('layers.')[2]}.weight" for s in stems if s.rpartition(".")[2] in _PLACES)
        if family.stacks_experts or len(matrices) < 3:
            tensors = _stacked(tensors, lora.rank)
            config["target_modules"] = [name for name in module_names(family) if name not in _PLACES]
            if matrices.difference(_DOWN):
                plain.append(_GATE_UP)
                config |= _patterns(lora)
            plain += ["experts.down_proj"] * (not matrices.isdisjoint(_DOWN))
        config["target_parameters"] = plain
    named = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(named, partial / WEIGHTS, metadata={"format": "pt"})
    shutil.rmtree(folder, ignore_errors=True)
    publish_folder(partial, folder, {ADAPTER_CONFIG: (json.dumps(config, indent=2) + "\n").encode()})


def _patterns(lora: LoraConfig) -> dict[str, dict[str, float]]:
    """Return the fields of a config for stacks of gate and up."""
    return {"rank_pattern": {_GATE_UP: 2 * lora.rank}, "alpha_pattern": {_GATE_UP: 2 * lora.alpha}}


def _stack_of(name: str, names: Container[str]) -> tuple[str, int, int, int]:
    """Return the stack of an expert's A or B, its number of places, the expert and the place.

    `names`: all names of the adapter. If a layer has both stacks, PEFT calls that of gate and up the base layer. A
    tensor of another layer is its own stack.
    """
    if (match := _EXPERT.fullmatch(name)) is None:
        return name, 1, 0, 0
    block, expert, matrix, letter = match.groups()
    stack = block.replace("block_sparse_moe", "mlp") + ".experts."
    base = f"{stack}base_layer.{letter}"
    if matrix in _DOWN:
        return stack + letter, 1, int(expert), 0
    has_down = base in names or any(f"{block}.experts.0.{down}.{letter}" in names for down in _DOWN)
    return base if has_down else stack + letter, 2, int(expert), _PLACES[matrix]


def _stack_sizes(tensors: Mapping[str, Index]) -> dict[str, Index]:
    """Return the shapes of the stacks. An expert's tensors come after those of the expert before it."""
    sizes: dict[str, Index] = {}
    for name, (rows, columns) in tensors.items():
        stack, num_places, expert, _ = _stack_of(name, tensors)
        width = num_places * (expert + 1)
        sizes[stack] = (width * rows, columns) if "lora_A" in name else (num_places * rows, width * columns)
    return sizes


def _stacked(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the stacks. Matrices without an adapter have zeros."""
    import torch

    sizes = _stack_sizes({name: (*tensor.shape,) for name, tensor in tensors.items()})
    stacks = {name: torch.zeros(size, dtype=next(iter(tensors.values())).dtype) for name, size in sizes.items()}
    for name, tensor in tensors.items():
        stack, num_places, expert, place = _stack_of(name, tensors)
        _matrices(name, stacks[stack], num_places, rank)[expert, ..., place] = tensor
    return stacks


def _matrices(name: str, stack: Tensor, num_places: int, rank: int) -> Tensor:
    """Return a stack's matrices [experts, rows, columns, places], a view."""
    if "lora_A" in name:
        return stack.unflatten(0, (-1, num_places, rank)).movedim(1, -1)
    blocks = stack.unflatten(1, (num_places, rank, -1)).unflatten(0, (num_places, -1))
    return blocks.diagonal(0, 0, 2).movedim(2, 0)


def export(state: Path, out: Path, model: ModelConfig, *, is_merged: bool) -> None:
    """Write the adapter in a checkpoint's state as a PEFT folder, or its base with the adapter merged into it."""
    from grpo_mega.checkpoint_io.megatron_weights import MegatronWeights
    from grpo_mega.checkpoint_io.reader import CheckpointReader

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

    from grpo_mega.checkpoint_io.output import make_partial, publish_folder
    from grpo_mega.checkpoint_io.reader import joined, open_reader, torch_dtype

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
    publish_folder(partial, out, side_contents(model.path, model.resolved_dtype) | index_of(shards, num_bytes))
