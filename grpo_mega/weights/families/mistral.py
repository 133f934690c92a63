"""Mistral: Llama with a sliding window."""

from dataclasses import replace

from grpo_mega.weights.families.llama import LLAMA

MISTRAL = replace(
    LLAMA,
    fields="""
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=14336 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int=8 head_dim:int?=null max_position_embeddings:int=131072
        rms_norm_eps:float=1e-06 bos_token_id:int?=1 eos_token_id:ids?=2 sliding_window:int?=4096
        attention_dropout:number=0.0
    """,
    heads_divide_hidden=False,
    served_by="mistral:MistralForCausalLM",
)
FAMILIES = {"mistral": MISTRAL}
