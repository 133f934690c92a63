"""Which features of a config.json the layers of `megatron/` compute as the Hugging Face model does; needs no torch.

`check_architecture` reads the file as it stands and also a transformers config made into a dict, which has the defaults of its
model type filled in.
"""

from __future__ import annotations

from typing import Any

from grpo_mega.errors import ConfigError

STATIC_ROPE = {"default", "linear", "llama3"}  # angles that depend on the position alone
_EXPERTS_PER_TOKEN = {"mixtral": 2, "qwen3_moe": 8}  # transformers' defaults
_DEMANDS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "router_jitter_noise": 0.0,
}


def check_architecture(config: dict[str, Any]) -> None:
    """Raises ConfigError for what would be computed otherwise than by the Hugging Face model, or not at all."""
    model_type = config.get("model_type")
    _check_quantization(config)
    _check_head_dim(config)
    if model_type in _EXPERTS_PER_TOKEN:
        experts_per_token(config)
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


def experts_per_token(config: dict[str, Any]) -> int:
    """Return to how many experts of a layer a token goes. Raises ConfigError."""
    model_type = str(config.get("model_type"))
    num_experts = config.get("num_local_experts") or config.get("num_experts") or 0
    value = config.get("num_experts_per_tok", _EXPERTS_PER_TOKEN[model_type])
    if not isinstance(value, int) or not 1 <= value <= num_experts:
        raise ConfigError(f"config.json has num_experts_per_tok={value!r}; it must be from 1 to {num_experts}")
    if value == 1 and config.get("norm_topk_prob", model_type == "mixtral"):
        raise ConfigError(
            f"config.json has num_experts_per_tok=1 for {model_type}, whose weights of a token's experts add up to 1: with a "
            "single one no gradient reaches the router, and Megatron refuses that; name another model"
        )
    return value


def position_problem(config: dict[str, Any], longest_sample: int) -> str | None:
    """Tell why the model has no positions for a sample of so many tokens, prompt and response; None if it has."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) == "linear":
        positions = int(positions * rope.get("factor", 1))
    if longest_sample <= positions:
        return None
    return (
        f"data.max_prompt_length + rollout.max_response_length={longest_sample}: must be at most the model's "
        f"max_position_embeddings={positions}; lower one of them"
    )


def _check_quantization(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if not quantization:
        return
    if not isinstance(quantization, dict):
        quantization = {}
    if quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size"):
        remedy = "write plain ones by tools/convert_hf_to_mcore.py HF_DIR OUT, and set model.path=OUT"
    else:
        remedy = "name the model that it was made from"
    method = quantization.get("quant_method")
    raise ConfigError(f"config.json has quantization_config (quant_method={method!r}): weights that train are plain; {remedy}")


def _check_head_dim(config: dict[str, Any]) -> None:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (hidden // heads if heads and hidden else 0)
    if isinstance(head_dim, int) and head_dim % 2:
        raise ConfigError(
            f"config.json means head_dim={head_dim}: must be even, since rotary embeddings pair its halves; name another model"
        )
