"""DeepSeek-V3 and R1, and Moonlight: DeepSeek-V2 with sigmoids and a bias per expert in its routers."""

from typing import Any

from grpo_mega.weights.fields import wrong
from grpo_mega.weights.spec import Family
from grpo_mega.weights.tables import DENSE_THEN_MOE, HEADS, LATENT_ATTENTION, ROUTER_BIAS


def _finish(fields: dict[str, Any]) -> None:
    if fields["v_head_dim"] is None:
        raise wrong("v_head_dim", None, "a positive whole number")
    fields.setdefault("head_dim", fields["qk_rope_head_dim"])


ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
DEEPSEEK_V3 = Family(
    (*LATENT_ATTENTION, *DENSE_THEN_MOE, ROUTER_BIAS),
    *HEADS,
    fields="""
        vocab_size:int=129280 hidden_size:int=7168 intermediate_size:int=18432 moe_intermediate_size:int=2048
        num_hidden_layers:int=61 num_attention_heads:int=128 num_key_value_heads:int?=128 n_shared_experts:int=1
        n_routed_experts:int=256 routed_scaling_factor:float=2.5 kv_lora_rank:int=512 q_lora_rank:int?=1536
        qk_rope_head_dim:int=64 v_head_dim:int?=128 qk_nope_head_dim:int=128 n_group:int?=8 topk_group:int?=4
        num_experts_per_tok:int?=8 first_k_dense_replace:int?=3 norm_topk_prob:bool?=true
        max_position_embeddings:int=4096 rms_norm_eps:float=1e-06 bos_token_id:int?=0 eos_token_id:ids?=1
        pretraining_tp:int?=1 rope_interleave:bool?=true attention_bias:bool=false attention_dropout:number?=0.0
        output_router_logits:bool=false num_mtp_layers:int=1
    """,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    moe_fields=("n_routed_experts", "moe_intermediate_size"),
    required=ROUTING | {"norm_topk_prob": True, "rope_interleave": True},
    finish=_finish,
    attention="latent",
    has_router_bias=True,
    served_by="deepseek_v2:DeepseekV3ForCausalLM",
    served_fields=ROUTING | {"moe_layer_freq": 1},
)
FAMILIES = {"deepseek_v3": DEEPSEEK_V3}
