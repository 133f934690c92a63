"""Mixtral: Mistral with experts."""

from grpo_mega.weights.spec import Family
from grpo_mega.weights.tables import ATTENTION, FINAL_NORM, HEADS, MLP_NORM, experts, router

_BLOCK = "block_sparse_moe"
FAMILIES = {
    "mixtral": Family(
        (*ATTENTION, MLP_NORM, router(_BLOCK), *experts(_BLOCK, ("w1", "w3", "w2")), FINAL_NORM),
        *HEADS,
        engine_ties=False,
        fields="""
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=14336 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int=8 head_dim:int?=null max_position_embeddings:int=131072
        rms_norm_eps:float=1e-05 bos_token_id:int?=1 eos_token_id:ids?=2 sliding_window:int?=null
        attention_dropout:number=0.0 num_experts_per_tok:int=2 num_local_experts:int=8
        output_router_logits:bool=false router_aux_loss_coef:float=0.001 router_jitter_noise:float=0.0
        """,
        aliases={"num_experts": "num_local_experts"},
        moe_fields=("num_local_experts", "intermediate_size"),
        rope_theta=1e6,
        served_by="mixtral:MixtralForCausalLM",
    )
}
