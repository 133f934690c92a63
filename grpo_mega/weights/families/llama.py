"""Llama. Families that name their tensors as Llama does differ only in their facts."""

from grpo_mega.weights.spec import Family
from grpo_mega.weights.tables import DENSE, HEADS

LLAMA = Family(
    DENSE,
    *HEADS,
    fields="""
        vocab_size:int=32000 hidden_size:int=4096 intermediate_size:int=11008 num_hidden_layers:int=32
        num_attention_heads:int=32 num_key_value_heads:int?=null max_position_embeddings:int=2048
        rms_norm_eps:float=1e-06 bos_token_id:int?=1 eos_token_id:ids?=2 pretraining_tp:int?=1
        attention_bias:bool=false attention_dropout:number?=0.0 mlp_bias:bool=false head_dim:int?=null
    """,
    heads_divide_hidden=True,
    served_by="llama:LlamaForCausalLM",
)
FAMILIES = {"llama": LLAMA}
