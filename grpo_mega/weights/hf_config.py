"""Resolve the fields of a config.json without transformers, with its defaults, aliases, precedence and types.

The table has the fields of each model type as transformers declares them: name:type=default. In types "?" allows null,
"ids" is a token id or a list of them, "number" is an int or a float. A test compares the table with the installed
transformers.

The launcher, the plan and the converters read a config.json with `resolve`. The ranks resolve transformers' own config
with it too, and refuse a model if the two results differ. Values that transformers refuses are refused here too, and so
are values that no model can have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_mega.errors import WeightMappingError

_ALL = """
    hidden_act:str="silu" initializer_range:float=0.02 pad_token_id:int?=null tie_word_embeddings:bool=false
    use_cache:bool=true
"""
_OF = {
    "deepseek_v2": """
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=11008 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=null max_position_embeddings:int=2048
        rms_norm_eps:float=1e-06 bos_token_id:int?=1 eos_token_id:ids?=2 pretraining_tp:int?=1 attention_bias:bool=false
        attention_dropout:float?=0.0 mlp_bias:bool=false head_dim:int?=null first_k_dense_replace:int=0
        kv_lora_rank:int=512 q_lora_rank:int?=1536 n_group:int?=null n_routed_experts:int=64 n_shared_experts:int=2
        qk_nope_head_dim:int=128 qk_rope_head_dim:int=64 routed_scaling_factor:float=1.0 topk_group:int?=null
        topk_method:str?="greedy" norm_topk_prob:bool?=false v_head_dim:int=128 num_experts_per_tok:int?=null
        moe_intermediate_size:int=1407 output_router_logits:bool=false
    """,
    "deepseek_v3": """
        vocab_size:int=129280 hidden_size:int=7168 intermediate_size:int=18432 moe_intermediate_size:int=2048
        num_hidden_layers:int=61 num_attention_heads:int=128 num_key_value_heads:int?=128 n_shared_experts:int=1
        n_routed_experts:int=256 routed_scaling_factor:float=2.5 kv_lora_rank:int=512 q_lora_rank:int?=1536
        qk_rope_head_dim:int=64 v_head_dim:int?=128 qk_nope_head_dim:int=128 n_group:int?=8 topk_group:int?=4
        num_experts_per_tok:int?=8 first_k_dense_replace:int?=3 norm_topk_prob:bool?=true
        max_position_embeddings:int=4096 rms_norm_eps:float=1e-06 bos_token_id:int?=0 eos_token_id:ids?=1
        pretraining_tp:int?=1 rope_interleave:bool?=true attention_bias:bool=false attention_dropout:number?=0.0
        output_router_logits:bool=false num_mtp_layers:int=1
    """,
    "glm4_moe": """
        vocab_size:int=151552 hidden_size:int=4096 intermediate_size:int=10944 num_hidden_layers:int=46
        num_attention_heads:int=96 num_key_value_heads:int=8 max_position_embeddings:int=131072 rms_norm_eps:float=1e-05
        attention_bias:bool=false attention_dropout:number=0.0 moe_intermediate_size:int=1408 num_experts_per_tok:int=8
        n_shared_experts:int=1 n_routed_experts:int=128 routed_scaling_factor:float=1.0 n_group:int=1 topk_group:int=1
        first_k_dense_replace:int=1 norm_topk_prob:bool=true use_qk_norm:bool=false bos_token_id:int?=null
        eos_token_id:ids?=null output_router_logits:bool=false num_mtp_layers:int=1
    """,
    "glm4_moe_lite": """
        vocab_size:int=154880 hidden_size:int=2048 intermediate_size:int=10240 moe_intermediate_size:int=1536
        num_hidden_layers:int=47 num_attention_heads:int=20 num_key_value_heads:int=20 n_shared_experts:int=1
        n_routed_experts:int=64 routed_scaling_factor:float=1.8 kv_lora_rank:int=512 q_lora_rank:int?=768
        qk_rope_head_dim:int=64 v_head_dim:int=256 qk_nope_head_dim:int=192 n_group:int=1 topk_group:int=1
        num_experts_per_tok:int=4 norm_topk_prob:bool=true max_position_embeddings:int=202752 rms_norm_eps:float=1e-05
        bos_token_id:int?=0 eos_token_id:ids?=1 pretraining_tp:int=1 rope_interleave:bool=true
        mlp_layer_types:texts?=null attention_bias:bool=false attention_dropout:number=0.0
        output_router_logits:bool=false
    """,
    "llama": """
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=11008 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=null max_position_embeddings:int=2048
        rms_norm_eps:float=1e-06 bos_token_id:int?=1 eos_token_id:ids?=2 pretraining_tp:int?=1 attention_bias:bool=false
        attention_dropout:number?=0.0 mlp_bias:bool=false head_dim:int?=null
    """,
    "mistral": """
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=14336 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int=8 head_dim:int?=null max_position_embeddings:int=131072
        rms_norm_eps:float=1e-06 bos_token_id:int?=1 eos_token_id:ids?=2 sliding_window:int?=4096
        attention_dropout:number=0.0
    """,
    "mixtral": """
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=14336 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int=8 head_dim:int?=null max_position_embeddings:int=131072
        rms_norm_eps:float=1e-05 bos_token_id:int?=1 eos_token_id:ids?=2 sliding_window:int?=null
        attention_dropout:number=0.0 num_experts_per_tok:int=2 num_local_experts:int=8 output_router_logits:bool=false
        router_aux_loss_coef:float=0.001 router_jitter_noise:float=0.0
    """,
    "qwen2": """
        vocab_size:int=151936 hidden_size:int=4096 intermediate_size:int=22016 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=32 max_position_embeddings:int=32768
        rms_norm_eps:float=1e-06 use_sliding_window:bool=false sliding_window:int?=4096 max_window_layers:int=28
        layer_types:texts?=null attention_dropout:number=0.0 bos_token_id:int?=null eos_token_id:ids?=null
    """,
    "qwen3": """
        vocab_size:int=151936 hidden_size:int=4096 intermediate_size:int=22016 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=32 head_dim:int=128 max_position_embeddings:int=32768
        rms_norm_eps:float=1e-06 attention_bias:bool=false use_sliding_window:bool=false sliding_window:int?=4096
        max_window_layers:int=28 layer_types:texts?=null attention_dropout:number=0.0 bos_token_id:int?=null
        eos_token_id:ids?=null
    """,
    "qwen3_5_text": """
        vocab_size:int=248320 hidden_size:int=4096 intermediate_size:int=12288 num_hidden_layers:int=32
        num_attention_heads:int=16 num_key_value_heads:int=4 max_position_embeddings:int=32768 rms_norm_eps:float=1e-06
        attention_bias:bool=false attention_dropout:number=0.0 head_dim:int=256 linear_conv_kernel_dim:int=4
        linear_key_head_dim:int=128 linear_value_head_dim:int=128 linear_num_key_heads:int=16
        linear_num_value_heads:int=32 layer_types:texts?=null bos_token_id:int?=null eos_token_id:ids?=null
    """,
    "qwen3_5_moe_text": """
        vocab_size:int=248320 hidden_size:int=2048 num_hidden_layers:int=40 num_attention_heads:int=16
        num_key_value_heads:int=2 max_position_embeddings:int=32768 rms_norm_eps:float=1e-06 attention_bias:bool=false
        attention_dropout:number=0.0 head_dim:int=256 linear_conv_kernel_dim:int=4 linear_key_head_dim:int=128
        linear_value_head_dim:int=128 linear_num_key_heads:int=16 linear_num_value_heads:int=32
        moe_intermediate_size:int=512 shared_expert_intermediate_size:int=512 num_experts_per_tok:int=8
        num_experts:int=256 output_router_logits:bool=false router_aux_loss_coef:float=0.001 layer_types:texts?=null
        bos_token_id:int?=null eos_token_id:ids?=null
    """,
    "qwen3_moe": """
        vocab_size:int=151936 hidden_size:int=2048 intermediate_size:int=6144 num_hidden_layers:int=24
        num_attention_heads:int=32 num_key_value_heads:int=4 max_position_embeddings:int=32768 rms_norm_eps:float=1e-06
        attention_bias:bool=false use_sliding_window:bool=false sliding_window:int?=4096 attention_dropout:number=0.0
        decoder_sparse_step:int=1 moe_intermediate_size:int=768 num_experts_per_tok:int=8 num_experts:int=128
        norm_topk_prob:bool=false output_router_logits:bool=false router_aux_loss_coef:float=0.001
        mlp_only_layers:ints?=null bos_token_id:int?=null eos_token_id:ids?=null
    """,
}
# Multimodal model types -> the type of their language model, which is all that trains. Its fields are in text_config.
MULTIMODAL = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
HYBRID = (*MULTIMODAL, *MULTIMODAL.values())  # model types with layers of linear attention (gated delta net)
HYBRID_MOE = ("qwen3_5_moe", "qwen3_5_moe_text")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # model types with multi-latent attention (MLA)
# Aliases of fields. If a file has both names, transformers uses the alias.
_EXPERT_ALIASES = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "deepseek_v3": _EXPERT_ALIASES,
    "glm4_moe": _EXPERT_ALIASES,
    "glm4_moe_lite": {"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
ROPE_THETA = {"mixtral": 1e6}  # defaults other than 10,000
ROTARY_SHARE = {"glm4_moe": 0.5, **dict.fromkeys(HYBRID, 0.25)}  # defaults other than 1
SINGLE_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor")  # transformers 5 moves them into rope_parameters


@dataclass(frozen=True)
class Field:
    kind: str
    default: Any

    def refuses(self, value: Any) -> str | None:
        """Return the required type of a value if the value has another type; None if it is right."""
        is_right, wording = _KINDS[self.kind.removesuffix("?")]
        may_be_null = self.kind.endswith("?")
        if is_right(value) or (may_be_null and value is None):
            return None
        return f"{wording} or null" if may_be_null else wording


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_int, "a whole number"),
    "float": (lambda value: isinstance(value, float), "a number with a decimal point or exponent"),
    "number": (lambda value: isinstance(value, float) or _is_int(value), "a number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "ids": (lambda value: _is_int(value) or _is_list_of(_is_int)(value), "a token id, a list of them"),
    "ints": (_is_list_of(_is_int), "a list of whole numbers"),
    "texts": (_is_list_of(lambda value: isinstance(value, str)), "a list of texts"),
}


def _parse(text: str) -> dict[str, Field]:
    fields = {}
    for item in text.split():
        declared, _, default = item.partition("=")
        name, _, kind = declared.partition(":")
        fields[name] = Field(kind, json.loads(default))
    return fields


FIELDS: Mapping[str, Mapping[str, Field]] = {
    model_type: _parse(_ALL) | _parse(_OF[MULTIMODAL.get(model_type, model_type)]) for model_type in (*_OF, *MULTIMODAL)
}
# Fields of every model type.
SHARED_FIELDS: Mapping[str, Field] = _parse(
    "transformers_version:str?=null architectures:texts?=null chunk_size_feed_forward:int=0"
    " is_encoder_decoder:bool=false output_hidden_states:bool?=false return_dict:bool?=true"
)

Fields = dict[str, Any]
_MAX_LAYERS, _MAX_COUNT, _MAX_SIZE = 10_000, 100_000, 10**12
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_MOE_ROWS = ("moe_intermediate_size", "shared_expert_intermediate_size")
# MoE model types: the fields with the number of experts, the rows of an expert, and the rows of the shared expert.
# Every config.json of the type has them, although transformers has a default for them.
MOE_FIELDS: Mapping[str, tuple[str, ...]] = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "qwen3_moe": ("num_experts", "moe_intermediate_size"),
    **dict.fromkeys(HYBRID_MOE, ("num_experts", *_MOE_ROWS)),
    **dict.fromkeys((*LATENT, "glm4_moe"), ("n_routed_experts", "moe_intermediate_size")),
}
_COUNTS = """
    num_attention_heads num_key_value_heads num_experts num_local_experts n_routed_experts n_shared_experts
    num_experts_per_tok n_group topk_group decoder_sparse_step linear_num_key_heads linear_num_value_heads
    """.split()  # noqa: SIM905  # a list of texts is three times as long
_SIZES = """
    vocab_size hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size head_dim
    max_position_embeddings kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    """.split()  # noqa: SIM905  # a list of texts is three times as long
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
_DTYPES = ("float32", "float", "float16", "half", "bfloat16", "float64", "double", "float8_e4m3fn", "float8_e5m2")
_DIVIDING_HEADS = ("llama", "deepseek_v2")  # hidden_size of these model types must be a multiple of the number of heads
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def resolve_config(raw: Mapping[str, Any]) -> Fields:
    """Return all fields of a config.json's contents. Raise WeightMappingError for an impossible value.

    A model type without a table of fields is returned as it is. `resolve` of the result returns the same fields.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FIELDS:
        return dict(raw)
    raw = _language_model(raw)
    fields, aliases, declared = dict(raw), ALIASES.get(model_type, {}), FIELDS[model_type]
    other_names = {name: alias for alias, name in aliases.items() if alias in raw}
    rows = ("intermediate_size",) * ("intermediate_size" in declared)
    for name in (*_NEEDED, *rows, *MOE_FIELDS.get(model_type, ())):
        if raw.get(other_names.get(name, name)) is None:
            raise WeightMappingError(f"config.json has no field {name!r}; is it the config of a causal language model?")
    for name, field in {**declared, **SHARED_FIELDS}.items():
        fields.setdefault(name, raw.get(aliases.get(name, name), field.default))
        given = other_names.get(name, name)
        if given in raw and (must_be := field.refuses(raw[given])):
            raise _wrong(given, raw[given], must_be)
    for name in ("id2label", "label2id", "rope_scaling", "rope_parameters"):
        if not isinstance(fields.get(name), dict | None):
            raise _wrong(name, fields[name], "an object or null")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    # Since transformers 5.20 files have the rotated share of a head only in rope_parameters.
    if (share := rope.get("partial_rotary_factor", ROTARY_SHARE.get(model_type))) is not None:
        fields.setdefault("partial_rotary_factor", share)
    _check_numbers(fields)
    for alias, name in aliases.items():
        fields[alias] = fields[name] = fields.get(alias, fields.get(name))
    heads = fields["num_attention_heads"]
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    if model_type in _DIVIDING_HEADS and fields["hidden_size"] % heads:
        raise _wrong("hidden_size", fields["hidden_size"], f"a multiple of num_attention_heads={heads}")
    if model_type == "deepseek_v2":
        fields["head_dim"] = fields["qk_rope_head_dim"]
    elif model_type == "deepseek_v3":
        fields.setdefault("head_dim", fields["qk_rope_head_dim"])
    elif fields.get("head_dim") is None:
        fields["head_dim"] = fields["hidden_size"] // heads
    if "use_sliding_window" in declared and not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    if "mlp_only_layers" in declared and fields["mlp_only_layers"] is None:
        fields["mlp_only_layers"] = []
    if model_type == "glm4_moe_lite":
        _resolve_layer_types(fields)
    if model_type in HYBRID:
        _resolve_attention_types(fields)
    _check_windows(fields)
    fields["rope_parameters"] = _rope(fields, ROPE_THETA.get(model_type, 1e4))
    return {name: value for name, value in fields.items() if name not in ("rope_scaling", "rope_theta")}


def _language_model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a multimodal model's language model under the type of the whole model; otherwise `raw`."""
    if raw["model_type"] not in MULTIMODAL or "text_config" not in raw:
        return raw
    text = raw["text_config"]
    if not isinstance(text, dict):
        raise _wrong("text_config", text, "an object")
    of_all, of_text = (one.get("tie_word_embeddings", False) for one in (raw, text))
    if of_all != of_text:
        raise WeightMappingError(
            f"config.json has tie_word_embeddings={_shown(of_all)}, and {_shown(of_text)} in text_config; libraries"
            " read either, so make them equal"
        )
    return text | {"model_type": raw["model_type"]}


def _resolve_attention_types(fields: Fields) -> None:
    """Set which layers of a hybrid model have linear attention."""
    if fields["layer_types"] is None:
        interval = fields.get("full_attention_interval", 4)
        if not _is_int(interval) or interval < 1:
            raise _wrong("full_attention_interval", interval, "a positive whole number")
        fields["layer_types"] = [
            "full_attention" if i % interval == 0 else "linear_attention"
            for i in range(1, fields["num_hidden_layers"] + 1)
        ]


def _resolve_layer_types(fields: Fields) -> None:
    """Set which layers have experts. transformers reads mlp_layer_types, and SGLang first_k_dense_replace."""
    num_layers, num_dense = fields["num_hidden_layers"], fields.setdefault("first_k_dense_replace", 1)
    types = fields["mlp_layer_types"] or ["dense", *["sparse"] * (num_layers - 1)]
    if types != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise WeightMappingError(
            f"config.json has mlp_layer_types={_shown(types)} and first_k_dense_replace={num_dense}; they must name the"
            " same first layers without experts, so correct the file"
        )
    fields["mlp_layer_types"] = types


def attention_windows(fields: Fields) -> tuple[int, ...]:
    """Return each layer's sliding window: the tokens that a token sees, itself included; 0: all tokens before it.

    () if no layer has a window. `fields` are resolved, by us or by transformers.
    """
    names, window = FIELDS.get(str(fields.get("model_type")), {}), fields.get("sliding_window")
    if "sliding_window" not in names or window is None:
        return ()
    layers = range(fields["num_hidden_layers"])
    types = fields.get("layer_types") if "layer_types" in names else None
    first = fields["max_window_layers"] if "max_window_layers" in names else 0
    windows = [window if (types[i] == _SLIDING if types else i >= first) else 0 for i in layers]
    return tuple(windows) if any(windows) else ()


def _check_windows(fields: Fields) -> None:
    """Check sliding_window and layer_types. Where types are no field of a family, transformers' cache reads them."""
    names, types, num_layers = FIELDS[fields["model_type"]], fields.get("layer_types"), fields["num_hidden_layers"]
    window = fields["sliding_window"] if "sliding_window" in names else None
    if window is not None and not 2 <= window <= _MAX_SIZE:
        raise _wrong("sliding_window", window, f"from 2 to {_MAX_SIZE:,}, or null")
    if types is not None and (not isinstance(types, list) or len(types) != num_layers):
        raise _wrong("layer_types", types, f"a list of num_hidden_layers={num_layers} texts")
    known = [_FULL] if window is None else [_FULL, _SLIDING] if "layer_types" in names else [_SLIDING]
    known += ["linear_attention"] * (fields["model_type"] in HYBRID)
    other = next((one for one in types or () if one not in known), None)
    if other is not None:
        raise WeightMappingError(
            f"config.json has {other!r} among layer_types; with sliding_window={window} only"
            f" {' and '.join(map(repr, known))} can be used, so correct the file or name another model"
        )


def difference(model_type: str, ours: Fields, theirs: Fields) -> str | None:
    """Return the first field with different values in two resolved configs of a model type; None if there is none."""
    for name in (*FIELDS.get(model_type, {}), "head_dim", "rope_parameters"):
        if ours.get(name) != theirs.get(name) and name != "layer_types":
            return f"{name} is {theirs.get(name)!r} for transformers, not {ours.get(name)!r}"
    if attention_windows(ours) != attention_windows(theirs):
        return f"the layers' windows are {attention_windows(theirs)} for transformers, not {attention_windows(ours)}"
    return None


def _check_numbers(fields: Fields) -> None:
    limits = dict.fromkeys(_SIZES, _MAX_SIZE) | dict.fromkeys(_COUNTS, _MAX_COUNT) | {"num_hidden_layers": _MAX_LAYERS}
    for name, limit in limits.items():
        value = fields.get(name)
        if value is not None and not (_is_int(value) and 1 <= value <= limit):
            raise _wrong(name, value, f"a positive whole number up to {limit:,}")
    if (fields.get("first_k_dense_replace") or 0) < 0:
        raise _wrong("first_k_dense_replace", fields["first_k_dense_replace"], "0 or more")
    for name, most in (("rms_norm_eps", 1), ("routed_scaling_factor", 1e6), ("partial_rotary_factor", 1)):
        value = fields.get(name)
        if value is not None and not (_is_number(value) and 0 < value <= most):
            raise _wrong(name, value, f"above 0 and at most {most:g}")
    if not 0 <= fields["initializer_range"] <= 1:
        raise _wrong("initializer_range", fields["initializer_range"], "from 0 to 1")
    for name in _TOKENS:
        ids = fields[name] if isinstance(fields[name], list) else [fields[name]]
        is_default = fields[name] == FIELDS[fields["model_type"]][name].default
        may_be = {None, -1} if name == "pad_token_id" else {None}
        if not is_default and any(i not in may_be and not 0 <= i < fields["vocab_size"] for i in ids):
            raise _wrong(name, fields[name], f"below vocab_size={fields['vocab_size']}, and not negative")
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) is not None and fields[name] not in _DTYPES:
            raise _wrong(name, fields[name], f"one of {', '.join(_DTYPES)}")


def _rope(fields: Fields, default_theta: float) -> Fields:
    """Return the rotary embedding's parameters from `rope_parameters`, `rope_scaling` and single fields."""
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    single = {name: fields[name] for name in SINGLE_ROPE_FIELDS if fields.get(name) is not None}
    if scaling and parameters and single | scaling != single | parameters:
        raise WeightMappingError(
            f"config.json has rope_scaling={_shown(scaling)}, which contradicts rope_parameters={_shown(parameters)}; "
            "remove one of them"
        )
    rope = dict(scaling or parameters or {})
    for name, value in single.items():
        if rope.setdefault(name, value) != value:
            raise WeightMappingError(
                f"config.json has {name}={_shown(value)}, which contradicts {_shown(rope[name])} in"
                " rope_parameters or rope_scaling; remove one of them"
            )
    rope.setdefault("rope_theta", fields.get("rope_theta", default_theta))
    kind = rope.setdefault("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise WeightMappingError(f"config.json has rope_type={kind!r} and type={rope['type']!r}; remove one of them")
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    _check_rope(rope, is_latent=fields["model_type"] in LATENT)
    return rope


def _check_rope(rope: Fields, *, is_latent: bool) -> None:
    for name, value in rope.items():
        if isinstance(value, dict):
            raise WeightMappingError(
                f"config.json has rope_parameters.{name}, of one kind of layers; one rotary embedding for all is"
                " supported, so name another model"
            )
    for name in _ROPE_NEEDS.get(str(rope["rope_type"]), ()):
        if name not in rope and (is_latent or rope["rope_type"] != "yarn"):
            raise WeightMappingError(f"config.json has rope_type {rope['rope_type']!r} without {name}; add it")
    for name in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if name in rope and not (_is_number(rope[name]) and 0 < rope[name] <= 1e15):
            raise _wrong(name, rope[name], "a positive number")
    if rope.get("factor", 1) < 1:
        raise _wrong("factor", rope["factor"], "at least 1, as the factor of rope_parameters")
    if rope["rope_type"] == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise _wrong("high_freq_factor", rope["high_freq_factor"], f"above low_freq_factor={rope['low_freq_factor']}")


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _wrong(name: str, value: Any, must_be: str) -> WeightMappingError:
    return WeightMappingError(f"config.json has {name}={_shown(value)}: must be {must_be}; correct the file")
