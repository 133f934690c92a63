"""The fields of each model type's config.json as transformers declares them: name:type=default.

Types: "?" allows null, "ids" is a token id or a list of them, "number" is an int or a float. A test compares the table with the
installed transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_ALL = """
    hidden_act:str="silu" initializer_range:float=0.02 pad_token_id:int?=null tie_word_embeddings:bool=false
    use_cache:bool=true
"""
_OF = {
    "deepseek_v2": """
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=11008 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=null max_position_embeddings:int=2048 rms_norm_eps:float=1e-06
        bos_token_id:int?=1 eos_token_id:ids?=2 pretraining_tp:int?=1 attention_bias:bool=false attention_dropout:float?=0.0
        mlp_bias:bool=false head_dim:int?=null first_k_dense_replace:int=0 kv_lora_rank:int=512 q_lora_rank:int?=1536
        n_group:int?=null n_routed_experts:int=64 n_shared_experts:int=2 qk_nope_head_dim:int=128 qk_rope_head_dim:int=64
        routed_scaling_factor:float=1.0 topk_group:int?=null topk_method:str?="greedy" norm_topk_prob:bool?=false
        v_head_dim:int=128 num_experts_per_tok:int?=null moe_intermediate_size:int=1407
    """,
    "deepseek_v3": """
        vocab_size:int=129280 hidden_size:int=7168 intermediate_size:int=18432 moe_intermediate_size:int=2048
        num_hidden_layers:int=61 num_attention_heads:int=128 num_key_value_heads:int?=128 n_shared_experts:int=1
        n_routed_experts:int=256 routed_scaling_factor:float=2.5 kv_lora_rank:int=512 q_lora_rank:int?=1536
        qk_rope_head_dim:int=64 v_head_dim:int?=128 qk_nope_head_dim:int=128 n_group:int?=8 topk_group:int?=4
        num_experts_per_tok:int?=8 first_k_dense_replace:int?=3 norm_topk_prob:bool?=true max_position_embeddings:int=4096
        rms_norm_eps:float=1e-06 bos_token_id:int?=0 eos_token_id:ids?=1 pretraining_tp:int?=1 rope_interleave:bool?=true
        attention_bias:bool=false attention_dropout:number?=0.0
    """,
    "glm4_moe": """
        vocab_size:int=151552 hidden_size:int=4096 intermediate_size:int=10944 num_hidden_layers:int=46
        num_attention_heads:int=96 num_key_value_heads:int=8 max_position_embeddings:int=131072 rms_norm_eps:float=1e-05
        attention_bias:bool=false attention_dropout:number=0.0 moe_intermediate_size:int=1408 num_experts_per_tok:int=8
        n_shared_experts:int=1 n_routed_experts:int=128 routed_scaling_factor:float=1.0 n_group:int=1 topk_group:int=1
        first_k_dense_replace:int=1 norm_topk_prob:bool=true use_qk_norm:bool=false bos_token_id:int?=null
        eos_token_id:ids?=null
    """,
    "llama": """
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=11008 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=null max_position_embeddings:int=2048 rms_norm_eps:float=1e-06
        bos_token_id:int?=1 eos_token_id:ids?=2 pretraining_tp:int?=1 attention_bias:bool=false
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
        num_attention_heads:int=32 num_key_value_heads:int?=32 max_position_embeddings:int=32768 rms_norm_eps:float=1e-06
        use_sliding_window:bool=false sliding_window:int?=4096 max_window_layers:int=28 layer_types:texts?=null
        attention_dropout:number=0.0 bos_token_id:int?=null eos_token_id:ids?=null
    """,
    "qwen3": """
        vocab_size:int=151936 hidden_size:int=4096 intermediate_size:int=22016 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=32 head_dim:int=128 max_position_embeddings:int=32768
        rms_norm_eps:float=1e-06 attention_bias:bool=false use_sliding_window:bool=false sliding_window:int?=4096
        max_window_layers:int=28 layer_types:texts?=null attention_dropout:number=0.0 bos_token_id:int?=null
        eos_token_id:ids?=null
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
# Aliases of fields. If a file has both names, transformers uses the alias.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    "glm4_moe": {"num_local_experts": "n_routed_experts"},
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
ROPE_THETA: Mapping[str, float] = {"mixtral": 1e6}  # defaults other than 10,000


@dataclass(frozen=True)
class Field:
    kind: str
    default: Any

    def refuses(self, value: Any) -> str | None:
        """Return the required type of a value if the value has another type; None if it is right."""
        kind = self.kind.removesuffix("?")
        is_right, wording = _KINDS[kind]
        if is_right(value) or (value is None and self.kind.endswith("?")):
            return None
        return f"{wording} or null" if self.kind.endswith("?") else wording


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


FIELDS: Mapping[str, Mapping[str, Field]] = {model_type: _parse(_ALL) | _parse(text) for model_type, text in _OF.items()}
# Fields of every model type.
SHARED_FIELDS: Mapping[str, Field] = _parse(
    "transformers_version:str?=null architectures:texts?=null chunk_size_feed_forward:int=0 is_encoder_decoder:bool=false "
    "output_hidden_states:bool?=false return_dict:bool?=true"
)
