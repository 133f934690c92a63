"""Qwen 3's models with experts in every layer."""

from grpo_mega.weights.spec import Family
from grpo_mega.weights.tables import ATTENTION, FINAL_NORM, HEADS, MLP_NORM, experts, qk_norms, router

FAMILIES = {
    "qwen3_moe": Family(
        (*ATTENTION, MLP_NORM, router(), *experts(), FINAL_NORM, *qk_norms("head_dim")),
        *HEADS,
        qk_norm=True,
        engine_ties=False,
        fields="""
        vocab_size:int=151936 hidden_size:int=2048 intermediate_size:int=6144 num_hidden_layers:int=24
        num_attention_heads:int=32 num_key_value_heads:int=4 max_position_embeddings:int=32768
        rms_norm_eps:float=1e-06 attention_bias:bool=false use_sliding_window:bool=false sliding_window:int?=4096
        attention_dropout:number=0.0 decoder_sparse_step:int=1 moe_intermediate_size:int=768
        num_experts_per_tok:int=8 num_experts:int=128 norm_topk_prob:bool=false output_router_logits:bool=false
        router_aux_loss_coef:float=0.001 mlp_only_layers:ints?=null bos_token_id:int?=null eos_token_id:ids?=null
        """,
        aliases={"num_local_experts": "num_experts"},
        moe_fields=("num_experts", "moe_intermediate_size"),
        served_by="qwen3_moe:Qwen3MoeForCausalLM",
    )
}
