"""GLM-4.5 and its successors: DeepSeek-V3's experts with usual attention."""

from grpo_mega.weights.spec import Family
from grpo_mega.weights.tables import ATTENTION, DENSE_THEN_MOE, HEADS, QKV_BIAS, ROUTER_BIAS, qk_norms

FAMILIES = {
    "glm4_moe": Family(
        (*ATTENTION, QKV_BIAS, *qk_norms("qk_norm"), *DENSE_THEN_MOE, ROUTER_BIAS),
        *HEADS,
        qkv_bias=True,
        engine_ties=False,
        fields="""
        vocab_size:int=151552 hidden_size:int=4096 intermediate_size:int=10944 num_hidden_layers:int=46
        num_attention_heads:int=96 num_key_value_heads:int=8 max_position_embeddings:int=131072
        rms_norm_eps:float=1e-05 attention_bias:bool=false attention_dropout:number=0.0
        moe_intermediate_size:int=1408 num_experts_per_tok:int=8 n_shared_experts:int=1 n_routed_experts:int=128
        routed_scaling_factor:float=1.0 n_group:int=1 topk_group:int=1 first_k_dense_replace:int=1
        norm_topk_prob:bool=true use_qk_norm:bool=false bos_token_id:int?=null eos_token_id:ids?=null
        output_router_logits:bool=false num_mtp_layers:int=1
        """,
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        moe_fields=("n_routed_experts", "moe_intermediate_size"),
        rotary_share=0.5,
        required={
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
        },
        has_router_bias=True,
        rotary="glm4_moe.modeling_glm4_moe:Glm4MoeRotaryEmbedding",
        served_by="glm4_moe:Glm4MoeForCausalLM",
    )
}
