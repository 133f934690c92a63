"""The model that a resolved config.json describes: its shape, unsupported features, experts and work per token.

Needs no torch.
"""

from collections.abc import Iterator
from typing import Any

from grpo_mega.errors import ConfigError, WeightMappingError, raise_all
from grpo_mega.weights.families import family_of
from grpo_mega.weights.hf_config import attention_windows, resolve_config
from grpo_mega.weights.spec import ModelShape

_STATIC_ROPE = "default", "linear", "llama3"  # angles depend only on the position
_LATENT_ROPE = "default", "yarn"  # for multi-latent attention
_LINEAR_FIELDS = {
    "linear_k_heads": "linear_num_key_heads",
    "linear_v_heads": "linear_num_value_heads",
    "linear_k_dim": "linear_key_head_dim",
    "linear_v_dim": "linear_value_head_dim",
    "linear_conv": "linear_conv_kernel_dim",
}
# Values that all models must have, apart from those of their family.
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
    shape = read_shape(fields)
    raise_all(architecture_problems(fields))
    return shape


def read_shape(config: dict[str, Any]) -> ModelShape:
    """Read the contents of a config.json. Raise WeightMappingError with the name of a missing or wrong field."""
    config = resolve_config(config)
    family = family_of(config["model_type"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise WeightMappingError(
            f"config.json has num_key_value_heads={kv_heads}; it must divide num_attention_heads={heads}"
        )
    more: dict[str, Any] = {"windows": attention_windows(config)}
    if family.moe_fields:
        experts, rows, *shared = family.moe_fields
        more |= {"num_experts": config[experts], "moe_ffn": config[rows]}
        more["shared_ffn"] = sum(config[name] for name in shared)
        _check_every_layer_has_experts(config)
    head_dim = config["head_dim"]
    if "use_qk_norm" in family.declared and config["use_qk_norm"]:
        more["qk_norm"] = head_dim
    if family.attention == "latent":
        more |= {"kv_lora": config["kv_lora_rank"], "q_lora": config["q_lora_rank"] or 0}
        more |= {"rope_dim": config["qk_rope_head_dim"], "v_dim": config["v_head_dim"]}
        head_dim, kv_heads = config["qk_nope_head_dim"] + more["rope_dim"], heads
    if family.attention == "hybrid":
        more |= {"linear_layers": _linear_layers(config)} | {name: config[key] for name, key in _LINEAR_FIELDS.items()}
    if "n_shared_experts" in family.declared:
        more["num_dense"] = config["first_k_dense_replace"] or 0
        more["shared_ffn"] = more["moe_ffn"] * config["n_shared_experts"]
        if more["num_dense"] >= config["num_hidden_layers"]:
            raise WeightMappingError(
                f"config.json has first_k_dense_replace={more['num_dense']}; it must leave experts in one of the "
                f"num_hidden_layers={config['num_hidden_layers']} at least"
            )
    return ModelShape(
        model_type=config["model_type"],
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config.get("intermediate_size") or more["moe_ffn"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config["vocab_size"],
        tied=config["tie_word_embeddings"],
        **more,
    )


def _linear_layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the layers with linear attention. Raise WeightMappingError if layers or heads are not supported."""
    types = config["layer_types"]
    layers = tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
    if len(layers) in (0, len(types)):
        raise WeightMappingError(
            "config.json has only one kind of layer_types; linear_attention and full_attention are supported together,"
            " so name another model"
        )
    k_heads, v_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if v_heads % k_heads:
        raise WeightMappingError(
            f"config.json has linear_num_key_heads={k_heads}; it must divide linear_num_value_heads={v_heads}"
        )
    return layers


def _check_every_layer_has_experts(config: dict[str, Any]) -> None:
    for name, value in (("decoder_sparse_step", 1), ("mlp_only_layers", []), ("moe_layer_freq", 1)):
        found = config.get(name)
        if found and found != value:
            raise WeightMappingError(
                f"config.json has {name}={found!r}; only {value!r} is supported, so use another model"
            )


def architecture_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield features that would be computed differently from the Hugging Face model, or not at all.

    `fields` are resolved (weights/hf_config.py).
    """
    model_type = fields["model_type"]
    family = family_of(model_type)
    is_latent = family.attention == "latent"
    if quantization := fields.get("quantization_config"):
        given = quantization if isinstance(quantization, dict) else {}
        method, remedy = given.get("quant_method"), "name the model that it was made from"
        if method == "fp8" and given.get("weight_block_size"):
            remedy = "write plain ones by `grpo-mega convert HF_DIR OUT`, and set model.path=OUT"
        yield f"config.json has quantization_config (quant_method={method!r}): weights that train are plain; {remedy}"
    heads = fields["num_attention_heads"]
    width = "qk_rope_head_dim" if is_latent else "head_dim"
    if fields[width] % 2:
        yield (
            f"config.json has {width}={fields[width]}: must be even, since rotary embeddings pair its halves; name"
            " another model"
        )
    if family.moe_fields:
        experts_per_token(fields)
    if is_latent and fields["num_key_value_heads"] != heads:
        yield (
            f"config.json has num_key_value_heads={fields['num_key_value_heads']}; it must be"
            f" num_attention_heads={heads}"
        )
    if family.has_router_bias:
        yield from _group_problems(fields)
    for name, supported in {**_REQUIRED, **family.required}.items():
        value = fields.get(name, supported)
        if value != supported and not (name == "sliding_window" and name in family.declared):
            yield (
                f"config.json has {name}={value!r}; only {supported!r} is supported for {model_type}, so name another"
                " model"
            )
    rope, known = fields["rope_parameters"]["rope_type"], _LATENT_ROPE if is_latent else _STATIC_ROPE
    if rope not in known:
        yield f"config.json has rope_type {rope!r}, which is not supported; supported are {', '.join(known)}"


def experts_per_token(fields: dict[str, Any]) -> int:
    """Return the number of experts per token in a layer. Raise ConfigError."""
    num_experts, value = fields[family_of(fields["model_type"]).moe_fields[0]], fields["num_experts_per_tok"]
    if value is None or value > num_experts:
        raise ConfigError(f"config.json has num_experts_per_tok={value!r}; it must be from 1 to {num_experts}")
    if value == 1 and fields.get("norm_topk_prob", True):
        raise ConfigError(
            f"config.json has num_experts_per_tok=1 for {fields['model_type']}, where the weights of a token's"
            " experts add up to 1: with a single one no gradient reaches the router, and Megatron refuses that; name"
            " another model"
        )
    return value


def _group_problems(fields: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons why Megatron cannot choose a token's experts from the best groups like DeepSeek-V3."""
    groups, chosen = fields.get("n_group") or 1, fields.get("topk_group") or 1
    num_experts, per_token = fields["n_routed_experts"], experts_per_token(fields)
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
