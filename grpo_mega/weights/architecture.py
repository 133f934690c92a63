"""Which features of a config.json the layers of `megatron/` compute as the Hugging Face model does; needs no torch.

`check_architecture` reads the file as it stands and also a transformers config made into a dict, which has the defaults of its
model type filled in.
"""

from __future__ import annotations

from typing import Any

from grpo_mega.errors import ConfigError

STATIC_ROPE = {"default", "linear", "llama3"}  # angles that depend on the position alone
_DEMANDS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "router_jitter_noise": 0.0,
}


def check_architecture(config: dict[str, Any]) -> None:
    """Raises ConfigError for what would be computed otherwise than by the Hugging Face model."""
    model_type = config.get("model_type")
    # Qwen names a window even where it is not used, and uses none unless told to; the others always use theirs.
    uses_window = config.get("use_sliding_window", False) if str(model_type).startswith("qwen") else True
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for name, supported in _DEMANDS.items():
        value = config.get(name, rope.get(name, supported))
        if value != supported and (name != "sliding_window" or uses_window):
            raise ConfigError(
                f"config.json has {name}={value!r}; only {supported!r} is supported for {model_type}, so name another model"
            )
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in STATIC_ROPE:
        supported = ", ".join(sorted(STATIC_ROPE))
        raise ConfigError(f"config.json has rope_type {rope_type!r}, which is not supported; supported are {supported}")
