"""Checks a config against the files that it names, before any process or device is taken; never imports torch.

Whatever is wrong with the layout for this model, or with a path or name, is a ConfigError of one line with the remedy.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from grpo_mega.config import Config, LayoutConfig
from grpo_mega.errors import ConfigError
from grpo_mega.rewards.registry import check_name
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape, read_config


def check(config: Config) -> None:
    """Raises ConfigError or WeightMappingError in one line for the first thing that cannot work."""
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(f"model.path={config.model.path} holds no config.json; name the folder of a Hugging Face checkpoint")
    _check_file("data.train", config.data.train)
    if config.data.heldout is not None:
        _check_file("data.heldout", config.data.heldout)
    for function in config.rewards.functions:
        check_name(function.name)
    shape = ModelShape.from_hf_config(read_config(config.model.path))
    family_of(shape.model_type)
    check_layout(config.layout, shape)
    # Megatron ignores fp8 without Transformer Engine, silently.
    if config.model.fp8 and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(f"model.fp8={config.model.fp8!r} needs Transformer Engine; install it or leave model.fp8 out")


def check_layout(layout: LayoutConfig, shape: ModelShape) -> None:
    """Raises ConfigError for a layout into which the model cannot be cut."""
    tp, kv = layout.tp, shape.num_kv_heads
    for what, size in (("attention heads", shape.num_heads), ("rows of the MLP", shape.ffn)):
        if size % tp:
            raise ConfigError(f"layout.tp={tp} does not divide the model's {size} {what}; use {_divisors(size)}")
    if kv % tp and tp % kv:
        raise ConfigError(f"layout.tp={tp} is neither a multiple nor a divisor of the model's {kv} key-value heads; use {kv}")
    num_chunks = layout.pp * (layout.vpp or 1)
    if num_chunks > shape.num_layers:
        raise ConfigError(
            f"layout.pp={layout.pp} with vpp={layout.vpp or 1} makes {num_chunks} model chunks, "
            f"but the model has {shape.num_layers} layers; use fewer"
        )
    sizes = layout.layers_per_chunk
    if sizes is not None and sum(sizes) != shape.num_layers:
        raise ConfigError(
            f"layout.layers_per_chunk={list(sizes)} adds up to {sum(sizes)}, but the model has {shape.num_layers} layers; "
            "change an entry or leave it out"
        )


def _check_file(key: str, path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"{key}={path} is not a file; name an existing data file")


def _divisors(n: int) -> str:
    small = [str(d) for d in range(1, min(n, 64) + 1) if n % d == 0]
    return f"one of {', '.join(small)}"
