"""Resolve the fields of a config.json without transformers, with its defaults, aliases, precedence and types.

A family's file has the fields that transformers declares for its model types. Ranks resolve transformers' own config
too. Values that transformers refuses are refused here, and so are values that no model can have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.families import MULTIMODAL, family_of
from grpo_mega.weights.fields import SHARED_FIELDS, is_int, is_number, shown, wrong
from grpo_mega.weights.spec import Family

Fields = dict[str, Any]
SINGLE_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor")  # transformers 5 moves them into rope_parameters

_MAX_LAYERS, _MAX_COUNT, _MAX_SIZE = 10_000, 100_000, 10**12
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_COUNTS = """
    num_attention_heads num_key_value_heads num_experts num_local_experts n_routed_experts n_shared_experts
    num_experts_per_tok n_group topk_group decoder_sparse_step linear_num_key_heads linear_num_value_heads
    """.split()  # noqa: SIM905  # a list of texts is three times as long
_SIZES = """
    vocab_size hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size head_dim
    max_position_embeddings kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    """.split()  # noqa: SIM905  # a list of texts is three times as long
_DTYPES = ("float32", "float", "float16", "half", "bfloat16", "float64", "double", "float8_e4m3fn", "float8_e5m2")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def resolve_config(raw: Mapping[str, Any]) -> Fields:
    """Return all fields of a config.json's contents, resolved or not.

    Raise WeightMappingError for an unknown model type or an impossible value.
    """
    family = family_of(raw.get("model_type"))
    raw = _language_model(raw)
    fields, aliases, declared = dict(raw), family.aliases, family.declared
    other_names = {name: alias for alias, name in aliases.items() if alias in raw}
    rows = ("intermediate_size",) * ("intermediate_size" in declared)
    for name in (*_NEEDED, *rows, *family.moe_fields):
        if raw.get(other_names.get(name, name)) is None:
            raise WeightMappingError(f"config.json has no field {name!r}; is it the config of a causal language model?")
    for name, field in {**declared, **SHARED_FIELDS}.items():
        fields.setdefault(name, raw.get(aliases.get(name, name), field.default))
        given = other_names.get(name, name)
        if given in raw and (must_be := field.refuses(raw[given])):
            raise wrong(given, raw[given], must_be)
    for name in ("id2label", "label2id", "rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name), dict | None):
            raise wrong(name, fields[name], "an object or null")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    # Since transformers 5.20 files have the rotated share of a head only in rope_parameters.
    if (share := rope.get("partial_rotary_factor", family.rotary_share)) is not None:
        fields.setdefault("partial_rotary_factor", share)
    _check_numbers(fields, family)
    for alias, name in aliases.items():
        fields[alias] = fields[name] = fields.get(alias, fields.get(name))
    heads = fields["num_attention_heads"]
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    if family.heads_divide_hidden and fields["hidden_size"] % heads:
        raise wrong("hidden_size", fields["hidden_size"], f"a multiple of num_attention_heads={heads}")
    if family.attention != "latent" and fields.get("head_dim") is None:
        fields["head_dim"] = fields["hidden_size"] // heads
    if "use_sliding_window" in declared and not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    if fields.get("mlp_only_layers", ()) is None:
        fields["mlp_only_layers"] = []
    if family.finish is not None:
        family.finish(fields)
    _check_windows(fields, family)
    fields["rope_parameters"] = _rope(fields, family)
    return {name: value for name, value in fields.items() if name not in ("rope_scaling", "rope_theta")}


def _language_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a multimodal model's language model under the type of the whole model; otherwise `raw`."""
    if raw["model_type"] not in MULTIMODAL or "text_config" not in raw:
        return raw
    text = raw["text_config"]
    if not isinstance(text, dict):
        raise wrong("text_config", text, "an object")
    of_all, of_text = (one.get("tie_word_embeddings", False) for one in (raw, text))
    if of_all != of_text:
        raise WeightMappingError(
            f"config.json has tie_word_embeddings={shown(of_all)}, and {shown(of_text)} in text_config; libraries"
            " read either, so make them equal"
        )
    return text | {"model_type": raw["model_type"]}


def attention_windows(fields: Fields) -> tuple[int, ...]:
    """Return each layer's sliding window: the tokens that a token sees, itself included; 0: all tokens before it.

    () if no layer has a window. `fields` are resolved, by us or by transformers.
    """
    names, window = family_of(fields["model_type"]).declared, fields.get("sliding_window")
    if "sliding_window" not in names or window is None:
        return ()
    layers = range(fields["num_hidden_layers"])
    types = fields.get("layer_types") if "layer_types" in names else None
    first = fields["max_window_layers"] if "max_window_layers" in names else 0
    windows = [window if (types[i] == _SLIDING if types else i >= first) else 0 for i in layers]
    return tuple(windows) if any(windows) else ()


def _check_windows(fields: Fields, family: Family) -> None:
    """Check sliding_window and layer_types. Where types are no field of a family, transformers' cache reads them."""
    names, types, num_layers = family.declared, fields.get("layer_types"), fields["num_hidden_layers"]
    window = fields["sliding_window"] if "sliding_window" in names else None
    if window is not None and not 2 <= window <= _MAX_SIZE:
        raise wrong("sliding_window", window, f"from 2 to {_MAX_SIZE:,}, or null")
    if types is not None and (not isinstance(types, list) or len(types) != num_layers):
        raise wrong("layer_types", types, f"a list of num_hidden_layers={num_layers} texts")
    known = [_FULL] if window is None else [_FULL, _SLIDING] if "layer_types" in names else [_SLIDING]
    known += ["linear_attention"] * (family.attention == "hybrid")
    other = next((one for one in types or () if one not in known), None)
    if other is not None:
        raise WeightMappingError(
            f"config.json has {other!r} among layer_types; with sliding_window={window} only"
            f" {' and '.join(map(repr, known))} can be used, so correct the file or name another model"
        )


def _check_numbers(fields: Fields, family: Family) -> None:
    limits = dict.fromkeys(_SIZES, _MAX_SIZE) | dict.fromkeys(_COUNTS, _MAX_COUNT) | {"num_hidden_layers": _MAX_LAYERS}
    for name, limit in limits.items():
        value = fields.get(name)
        if value is not None and not (is_int(value) and 1 <= value <= limit):
            raise wrong(name, value, f"a positive whole number up to {limit:,}")
    if (fields.get("first_k_dense_replace") or 0) < 0:
        raise wrong("first_k_dense_replace", fields["first_k_dense_replace"], "0 or more")
    for name, most in (("rms_norm_eps", 1), ("routed_scaling_factor", 1e6), ("partial_rotary_factor", 1)):
        value = fields.get(name)
        if value is not None and not (is_number(value) and 0 < value <= most):
            raise wrong(name, value, f"above 0 and at most {most:g}")
    if not 0 <= fields["initializer_range"] <= 1:
        raise wrong("initializer_range", fields["initializer_range"], "from 0 to 1")
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = fields[name] if isinstance(fields[name], list) else [fields[name]]
        is_default = fields[name] == family.declared[name].default
        may_be = {None, -1} if name == "pad_token_id" else {None}
        if not is_default and any(i not in may_be and not 0 <= i < fields["vocab_size"] for i in ids):
            raise wrong(name, fields[name], f"below vocab_size={fields['vocab_size']}, and not negative")
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) is not None and fields[name] not in _DTYPES:
            raise wrong(name, fields[name], f"one of {', '.join(_DTYPES)}")


def _rope(fields: Fields, family: Family) -> Fields:
    """Return the rotary embedding's parameters from `rope_parameters`, `rope_scaling` and single fields."""
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    single = {name: fields[name] for name in SINGLE_ROPE_FIELDS if fields.get(name) is not None}
    if scaling and parameters and single | scaling != single | parameters:
        raise WeightMappingError(
            f"config.json has rope_scaling={shown(scaling)}, which contradicts rope_parameters={shown(parameters)}; "
            "remove one of them"
        )
    rope = dict(scaling or parameters or {})
    for name, value in single.items():
        if rope.setdefault(name, value) != value:
            raise WeightMappingError(
                f"config.json has {name}={shown(value)}, which contradicts {shown(rope[name])} in"
                " rope_parameters or rope_scaling; remove one of them"
            )
    rope.setdefault("rope_theta", fields.get("rope_theta", family.rope_theta))
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise WeightMappingError(f"config.json has rope_type={kind!r} and type={rope['type']!r}; remove one of them")
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    _check_rope(rope, family)
    return rope


def _check_rope(rope: Fields, family: Family) -> None:
    for name, value in rope.items():
        if isinstance(value, dict):
            raise WeightMappingError(
                f"config.json has rope_parameters.{name}, of one kind of layers; one rotary embedding for all is"
                " supported, so name another model"
            )
    for name in _ROPE_NEEDS.get(str(rope["rope_type"]), ()):
        if name not in rope and (family.attention == "latent" or rope["rope_type"] != "yarn"):
            raise WeightMappingError(f"config.json has rope_type {rope['rope_type']!r} without {name}; add it")
    for name in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if name in rope and not (is_number(rope[name]) and 0 < rope[name] <= 1e15):
            raise wrong(name, rope[name], "a positive number")
    if rope.get("factor", 1) < 1:
        raise wrong("factor", rope["factor"], "at least 1, as the factor of rope_parameters")
    if rope["rope_type"] == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise wrong("high_freq_factor", rope["high_freq_factor"], f"above low_freq_factor={rope['low_freq_factor']}")
