"""GLM-4.7-Flash: DeepSeek-V3's layers."""

from dataclasses import replace
from typing import Any

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.families.deepseek_v3 import DEEPSEEK_V3, ROUTING
from grpo_mega.weights.fields import shown


def _resolve_layer_types(fields: dict[str, Any]) -> None:
    """Set which layers have experts. transformers reads mlp_layer_types, and SGLang first_k_dense_replace."""
    num_layers, num_dense = fields["num_hidden_layers"], fields.setdefault("first_k_dense_replace", 1)
    types = fields["mlp_layer_types"] or ["dense", *["sparse"] * (num_layers - 1)]
    if types != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise WeightMappingError(
            f"config.json has mlp_layer_types={shown(types)} and first_k_dense_replace={num_dense}; they must name the"
            " same first layers without experts, so correct the file"
        )
    fields["mlp_layer_types"] = types


FAMILIES = {
    "glm4_moe_lite": replace(
        DEEPSEEK_V3,
        engine_ties=False,
        fields="""
        vocab_size:int=154880 hidden_size:int=2048 intermediate_size:int=10240 moe_intermediate_size:int=1536
        num_hidden_layers:int=47 num_attention_heads:int=20 num_key_value_heads:int=20 n_shared_experts:int=1
        n_routed_experts:int=64 routed_scaling_factor:float=1.8 kv_lora_rank:int=512 q_lora_rank:int?=768
        qk_rope_head_dim:int=64 v_head_dim:int=256 qk_nope_head_dim:int=192 n_group:int=1 topk_group:int=1
        num_experts_per_tok:int=4 norm_topk_prob:bool=true max_position_embeddings:int=202752
        rms_norm_eps:float=1e-05 bos_token_id:int?=0 eos_token_id:ids?=1 pretraining_tp:int=1
        rope_interleave:bool=true mlp_layer_types:texts?=null attention_bias:bool=false attention_dropout:number=0.0
        output_router_logits:bool=false
        """,
        aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        finish=_resolve_layer_types,
        served_by="glm4_moe_lite:Glm4MoeLiteForCausalLM",
        served_fields=ROUTING | {"first_k_dense_replace": 1},
    )
}
