"""The model that a resolved config.json describes: its shape, unsupported features, experts and work per token.

Needs no torch.
"""

from collections.abc import Iterator
from typing import Any

from grpo_mega.errors import ConfigError, raise_all
from grpo_mega.weights.families import family_of
from grpo_mega.weights.hf_config import FIELDS, HYBRID, HYBRID_MOE, resolve_config
from grpo_mega.weights.spec import ModelShape

STATIC_ROPE = {"default", "linear", "llama3"}  # angles depend only on the position
LATENT_ROPE = {"default", "yarn"}  # for multi-latent attention
_WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", *HYBRID_MOE)
WITH_ROUTER_BIAS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # routers with a bias per expert
_LIKE_DEEPSEEK_V3 = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_interleave": True,
}
# Values that models with multi-latent attention must have.
_LATENT_REQUIRED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": _LIKE_DEEPSEEK_V3,
    "glm4_moe_lite": _LIKE_DEEPSEEK_V3,
}
_REQUIRED_OF = _LATENT_REQUIRED | {
    **{key: {"partial_rotary_factor": 0.25, "attn_output_gate": True, "norm_topk_prob": True} for key in HYBRID},
    "glm4_moe": {
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
    },
}
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "partial_rotary_factor": 1.0,
    "router_jitter_noise": 0.0,
}


def shape_of(fields: dict[str, Any]) -> ModelShape:
    """Return the shape from a config.json's fields. Raise ConfigError or WeightMappingError if it cannot be trained."""
    fields = resolve_config(fields)
    shape = ModelShape.from_hf_config(fields)
    family_of(shape.model_type)
    raise_all(architecture_problems(fields))
    return shape


def architecture_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield features that would be computed differently from the Hugging Face model, or not at all.

    `fields` are resolved (weights/hf_config.py).
    """
    model_type = fields.get("model_type")
    if quantization := fields.get("quantization_config"):
        given = quantization if isinstance(quantization, dict) else {}
        method, remedy = given.get("quant_method"), "name the model that it was made from"
        if method == "fp8" and given.get("weight_block_size"):
            remedy = "write plain ones by `grpo-mega convert HF_DIR OUT`, and set model.path=OUT"
        yield f"config.json has quantization_config (quant_method={method!r}): weights that train are plain; {remedy}"
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    width = "qk_rope_head_dim" if model_type in _LATENT_REQUIRED else "head_dim"
    head_dim = fields.get(width) or (hidden // heads if heads and hidden else 0)
    if isinstance(head_dim, int) and head_dim % 2:
        yield (
            f"config.json has {width}={head_dim}: must be even, since rotary embeddings pair its halves; name another"
            " model"
        )
    if model_type in _WITH_EXPERTS:
        experts_per_token(fields)
    if model_type in _LATENT_REQUIRED and fields.get("num_key_value_heads", heads) not in (heads, None):
        yield (
            f"config.json has num_key_value_heads={fields['num_key_value_heads']}; it must be"
            f" num_attention_heads={heads}"
        )
    if model_type in WITH_ROUTER_BIAS:
        yield from _group_problems(fields)
    rope = rope_settings(fields)
    for name, supported in (_REQUIRED | _REQUIRED_OF.get(str(model_type), {})).items():
        value = fields.get(name, rope.get(name, supported))
        if value != supported and not (name == "sliding_window" and name in FIELDS.get(str(model_type), {})):
            yield (
                f"config.json has {name}={value!r}; only {supported!r} is supported for {model_type}, so name another"
                " model"
            )
    static = LATENT_ROPE if model_type in _LATENT_REQUIRED else STATIC_ROPE
    if rope["rope_type"] not in static:
        supported = ", ".join(sorted(static))
        yield f"config.json has rope_type {rope['rope_type']!r}, which is not supported; supported are {supported}"


def experts_per_token(fields: dict[str, Any]) -> int:
    """Return the number of experts per token in a layer. Raise ConfigError."""
    model_type = str(fields.get("model_type"))
    num_experts = next(
        (fields[n] for n in ("n_routed_experts", "num_local_experts", "num_experts") if fields.get(n)), 0
    )
    value = fields.get("num_experts_per_tok")
    if not isinstance(value, int) or not 1 <= value <= num_experts:
        raise ConfigError(f"config.json has num_experts_per_tok={value!r}; it must be from 1 to {num_experts}")
    if value == 1 and fields.get("norm_topk_prob", model_type in ("mixtral", *WITH_ROUTER_BIAS, *HYBRID_MOE)):
        raise ConfigError(
            f"config.json has num_experts_per_tok=1 for {model_type}, where the weights of a token's experts add up to"
            " 1: with a single one no gradient reaches the router, and Megatron refuses that; name another model"
        )
    return value


def _group_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons why Megatron cannot choose a token's experts from the best groups like DeepSeek-V3."""
    groups, chosen = fields.get("n_group") or 1, fields.get("topk_group") or 1
    num_experts, per_token = fields.get("n_routed_experts") or 0, experts_per_token(fields)
    if chosen >= groups:
        return
    if num_experts % groups or per_token > chosen * (num_experts // groups):
        yield (
            f"config.json has n_group={groups}, topk_group={chosen}: {num_experts} experts do not make equal groups, "
            f"{chosen} of them with num_experts_per_tok={per_token}; correct the file"
        )
    elif per_token // chosen != 2:
        yield (
            f"config.json has num_experts_per_tok={per_token}, topk_group={chosen}: Megatron scores a group by its best"
            f" {per_token // chosen} experts, DeepSeek-V3 by its best 2; name another model"
        )


def rope_settings(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary embeddings, at least rope_type."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return {"rope_type": rope.get("type", "default"), **rope}


def tokens_per_pair(shape: ModelShape, experts_per_token: int = 0) -> float:
    """Return the work of attention for a query and a key that it sees, relative to all other work for a token."""
    weights = shape.num_layers * layer_weights(shape, experts_per_token) + shape.hidden * shape.vocab
    return shape.num_full_layers * (shape.q + shape.v) / weights


def layer_weights(shape: ModelShape, experts_per_token: int = 0) -> float:
    """Return the mean number of weights per layer that multiply a token. Raise ConfigError if it has fewer experts."""
    attention: float = shape.hidden * (shape.q + 2 * shape.kv) + shape.q * shape.hidden
    if shape.kv_lora:
        queries = shape.q_lora * (shape.hidden + shape.q) if shape.q_lora else shape.hidden * shape.q
        attention = queries + shape.hidden * shape.kv_down + shape.kv_lora * shape.kv_up + shape.v * shape.hidden
    if shape.linear_layers:
        attention += shape.hidden * shape.q  # the output gate
        share = len(shape.linear_layers) / shape.num_layers
        projections = shape.hidden * (2 * shape.linear_k + 3 * shape.linear_v + 2 * shape.linear_v_heads)
        convolution = (2 * shape.linear_k + shape.linear_v) * shape.linear_conv
        state = 4 * shape.linear_v * shape.linear_k_dim  # decay, reading and update of the state
        attention = share * (projections + convolution + state) + (1 - share) * attention
    if not shape.num_experts:
        return attention + 3 * shape.hidden * shape.ffn
    if not 1 <= experts_per_token <= shape.num_experts:
        raise ConfigError(
            f"experts_per_token={experts_per_token}: must be in 1 .. {shape.num_experts} for an MoE model; "
            "give the config's num_experts_per_tok"
        )
    chosen = shape.hidden * (shape.num_experts + shape.shared_gates) + 3 * shape.hidden * (
        experts_per_token * shape.moe_ffn + shape.shared_ffn
    )
    return attention + chosen + shape.num_dense * (3 * shape.hidden * shape.ffn - chosen) / shape.num_layers
