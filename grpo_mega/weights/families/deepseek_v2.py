"""DeepSeek-V2: multi-latent attention, first dense layers, shared experts, and routers with a softmax."""

from typing import Any

from grpo_mega.weights.spec import Family
from grpo_mega.weights.tables import DENSE_THEN_MOE, HEADS, LATENT_ATTENTION


def _finish(fields: dict[str, Any]) -> None:
    fields["head_dim"] = fields["qk_rope_head_dim"]


FAMILIES = {
    "deepseek_v2": Family(
        (*LATENT_ATTENTION, *DENSE_THEN_MOE),
        *HEADS,
        fields="""
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=11008 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=null max_position_embeddings:int=2048
        rms_norm_eps:float=1e-06 bos_token_id:int?=1 eos_token_id:ids?=2 pretraining_tp:int?=1
        attention_bias:bool=false attention_dropout:float?=0.0 mlp_bias:bool=false head_dim:int?=null
        first_k_dense_replace:int=0 kv_lora_rank:int=512 q_lora_rank:int?=1536 n_group:int?=null
        n_routed_experts:int=64 n_shared_experts:int=2 qk_nope_head_dim:int=128 qk_rope_head_dim:int=64
        routed_scaling_factor:float=1.0 topk_group:int?=null topk_method:str?="greedy" norm_topk_prob:bool?=false
        v_head_dim:int=128 num_experts_per_tok:int?=null moe_intermediate_size:int=1407
        output_router_logits:bool=false
        """,
        moe_fields=("n_routed_experts", "moe_intermediate_size"),
        required={"scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
        heads_divide_hidden=True,
        finish=_finish,
        attention="latent",
        ignores_mscale=True,
        served_by="deepseek_v2:DeepseekV2ForCausalLM",
        served_fields={"moe_layer_freq": 1, "scoring_func": "softmax"},
    )
}
