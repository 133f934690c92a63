"""Qwen 3: Llama with norms of queries and keys."""

from grpo_mega.weights.spec import Family
from grpo_mega.weights.tables import DENSE, HEADS, qk_norms

FAMILIES = {
    "qwen3": Family(
        (*DENSE, *qk_norms("head_dim")),
        *HEADS,
        qk_norm=True,
        fields="""
        vocab_size:int=151936 hidden_size:int=4096 intermediate_size:int=22016 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=32 head_dim:int=128 max_position_embeddings:int=32768
        rms_norm_eps:float=1e-06 attention_bias:bool=false use_sliding_window:bool=false sliding_window:int?=4096
        max_window_layers:int=28 layer_types:texts?=null attention_dropout:number=0.0 bos_token_id:int?=null
        eos_token_id:ids?=null
        """,
        served_by="qwen3:Qwen3ForCausalLM",
    )
}
