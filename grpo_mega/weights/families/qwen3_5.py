"""Qwen 3.5 and 3.6, without and with experts: hybrids of linear and full attention.

Layers have linear attention (gated delta net, arXiv 2412.06464), and every few of them full attention with an output
gate. MoE models have a gate, a single row, for the shared expert. A multimodal model's table has the tensors of its
language model only.
"""

from dataclasses import replace
from typing import Any

from grpo_mega.weights.fields import is_int, wrong
from grpo_mega.weights.spec import Family, Op, Row
from grpo_mega.weights.tables import (
    ATTENTION,
    FINAL_NORM,
    HEADS,
    HF,
    INPUT_NORM,
    MCORE,
    MLP,
    MLP_NORM,
    Copy,
    GatedQKV,
    Stacked,
    experts,
    mlp,
    qk_norms,
    router,
)

_QKV_PARTS = (0, "linear_k"), (0, "linear_k"), (0, "linear_v")
_QKV_KEYS = "query", "key", "value"


def _linear_attention() -> tuple[Row, ...]:
    def row(hf: str, megatron: str, op: Op, saved_as: tuple[str, ...] = ()) -> Row:
        hf_names = tuple(f"{HF}linear_attn.{name}" for name in hf.split())
        name, is_linear = f"{MCORE}self_attention.{megatron}", "_proj" in megatron
        return Row(hf_names, name, op, is_linear=is_linear, span="linear", saved_as=saved_as)

    heads = Copy(("linear_v_heads",), 0)
    z_b_a = (1, "linear_v"), (2, "linear_v_heads"), (3, "linear_v_heads")
    in_proj = Stacked((*_QKV_PARTS, *z_b_a), ("hidden",))
    in_names = " ".join(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    return (
        replace(INPUT_NORM, megatron_te=MCORE + "self_attention.in_proj.layer_norm_weight", span="linear"),
        row("dt_bias", "dt_bias", heads),
        row("A_log", "A_log", heads),
        row(in_names, "in_proj.weight", in_proj, (*_QKV_KEYS, "z", "beta", "alpha")),
        row("conv1d.weight", "conv1d.weight", Stacked(_QKV_PARTS, ("one", "linear_conv")), _QKV_KEYS),
        row("norm.weight", "out_norm.weight", Copy(("linear_v_dim",))),
        row("out_proj.weight", "out_proj.weight", Copy(("hidden", "linear_v"), 1)),
    )


_FULL_ATTENTION = tuple(
    replace(row, span="full", op=GatedQKV(("hidden",)) if "linear_qkv" in row.megatron else row.op)
    for row in (*ATTENTION, *qk_norms("head_dim"))
)

_GATED_MOE = (
    MLP_NORM,
    router(),
    *mlp("mlp.shared_experts", "shared_ffn", hf_block="mlp.shared_expert"),
    Row(
        (HF + "mlp.shared_expert_gate.weight",),
        MCORE + "mlp.shared_experts.gate_weight",
        Copy(("shared_gates", "hidden")),
    ),
    *experts(),
    FINAL_NORM,
)


def _resolve_attention_types(fields: dict[str, Any]) -> None:
    """Set which layers of a hybrid model have linear attention."""
    if fields["layer_types"] is None:
        interval = fields.get("full_attention_interval", 4)
        if not is_int(interval) or interval < 1:
            raise wrong("full_attention_interval", interval, "a positive whole number")
        fields["layer_types"] = [
            "full_attention" if i % interval == 0 else "linear_attention"
            for i in range(1, fields["num_hidden_layers"] + 1)
        ]


_DENSE = Family(
    (*_linear_attention(), *_FULL_ATTENTION, *MLP, FINAL_NORM),
    *HEADS,
    qk_norm=True,
    fields="""
        vocab_size:int=248320 hidden_size:int=4096 intermediate_size:int=12288 num_hidden_layers:int=32
        num_attention_heads:int=16 num_key_value_heads:int=4 max_position_embeddings:int=32768
        rms_norm_eps:float=1e-06 attention_bias:bool=false attention_dropout:number=0.0 head_dim:int=256
        linear_conv_kernel_dim:int=4 linear_key_head_dim:int=128 linear_value_head_dim:int=128
        linear_num_key_heads:int=16 linear_num_value_heads:int=32 layer_types:texts?=null bos_token_id:int?=null
        eos_token_id:ids?=null
    """,
    rotary_share=0.25,
    required={"partial_rotary_factor": 0.25, "attn_output_gate": True, "norm_topk_prob": True},
    finish=_resolve_attention_types,
    multimodal="qwen3_5",
    attention="hybrid",
    rotary="qwen3_5.modeling_qwen3_5:Qwen3_5TextRotaryEmbedding",
    served_by="qwen3_5_text:Qwen3_5ForCausalLM",
)
_MOE = replace(
    _DENSE,
    rows=(*_linear_attention(), *_FULL_ATTENTION, *_GATED_MOE),
    stacks_experts=True,
    fields="""
        vocab_size:int=248320 hidden_size:int=2048 num_hidden_layers:int=40 num_attention_heads:int=16
        num_key_value_heads:int=2 max_position_embeddings:int=32768 rms_norm_eps:float=1e-06
        attention_bias:bool=false attention_dropout:number=0.0 head_dim:int=256 linear_conv_kernel_dim:int=4
        linear_key_head_dim:int=128 linear_value_head_dim:int=128 linear_num_key_heads:int=16
        linear_num_value_heads:int=32 moe_intermediate_size:int=512 shared_expert_intermediate_size:int=512
        num_experts_per_tok:int=8 num_experts:int=256 output_router_logits:bool=false
        router_aux_loss_coef:float=0.001 layer_types:texts?=null bos_token_id:int?=null eos_token_id:ids?=null
    """,
    moe_fields=("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size"),
    multimodal="qwen3_5_moe",
    served_by=None,
)
FAMILIES = {"qwen3_5_text": _DENSE, "qwen3_5_moe_text": _MOE}
