"""Qwen 2 and 2.5: Llama with biases of queries, keys and values."""

from grpo_mega.weights.spec import Family
from grpo_mega.weights.tables import DENSE, HEADS, QKV_BIAS

FAMILIES = {
    "qwen2": Family(
        (*DENSE, QKV_BIAS),
        *HEADS,
        qkv_bias=True,
        fields="""
        vocab_size:int=151936 hidden_size:int=4096 intermediate_size:int=22016 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=32 max_position_embeddings:int=32768
        rms_norm_eps:float=1e-06 use_sliding_window:bool=false sliding_window:int?=4096 max_window_layers:int=28
        layer_types:texts?=null attention_dropout:number=0.0 bos_token_id:int?=null eos_token_id:ids?=null
        """,
        served_by="qwen2:Qwen2ForCausalLM",
    )
}
