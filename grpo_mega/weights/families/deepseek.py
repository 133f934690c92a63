"""deepseek_v2, deepseek_v3 and glm4_moe: first layers with an MLP, then layers with experts and shared experts.

DeepSeek's models have multi-latent attention: queries, keys and values are computed from latents. Latents are whole on every
tensor-parallel rank; the matrices after them are split by heads. glm4_moe has Llama's attention with biases, and in some sizes
norms of queries and keys. deepseek_v3 and glm4_moe add a bias per expert to the router's scores when they choose experts. No
optimizer changes it.
"""

from __future__ import annotations

from grpo_mega.weights.families.dense import ATTENTION, EMBEDDING, FINAL_NORM, OUTPUT, QKV_BIAS, qk_norms
from grpo_mega.weights.ops import Copy, GateUp
from grpo_mega.weights.spec import Family, Row, Span

_HF = "model.layers.{i}."
_MCORE = "decoder.layers.{i}."
_HF_EXPERTS = _HF + "mlp.experts."
_EXPERT = _MCORE + "mlp.experts.local_experts.{e}."


def _attention(hf: str, megatron: str, dims: tuple[str, ...], axis: int | None = None, engine: str | None = None) -> Row:
    names = (f"{_HF}self_attn.{hf}.weight",), f"{_MCORE}self_attention.{megatron}.weight"
    return Row(*names, Copy(dims, axis), engine=engine, is_linear=len(dims) == 2)


def _mlp(block: str, rows: str, span: Span) -> tuple[Row, Row]:
    hf, megatron = f"{_HF}{block}.", f"{_MCORE}{block}."
    return (
        Row(
            (hf + "gate_proj.weight", hf + "up_proj.weight"),
            megatron + "linear_fc1.weight",
            GateUp(rows),
            engine=hf + "gate_up_proj.weight",
            is_linear=True,
            span=span,
        ),
        Row(
            (hf + "down_proj.weight",),
            megatron + "linear_fc2.weight",
            Copy(("hidden", rows), axis=1),
            is_linear=True,
            span=span,
        ),
    )


_FUSED = _HF + "self_attn.fused_qkv_a_proj_with_mqa.weight"  # used if the queries have a latent too

_LATENT = (
    Row((_HF + "input_layernorm.weight",), _MCORE + "input_layernorm.weight", Copy(("hidden",))),
    _attention("q_proj", "linear_q_proj", ("q_from_hidden", "hidden"), axis=0),
    _attention("q_a_proj", "linear_q_down_proj", ("q_lora", "hidden"), engine=_FUSED),
    _attention("q_a_layernorm", "q_layernorm", ("q_lora",)),
    _attention("q_b_proj", "linear_q_up_proj", ("q", "q_lora"), axis=0),
    _attention("kv_a_proj_with_mqa", "linear_kv_down_proj", ("kv_down_fused", "hidden"), engine=_FUSED),
    _attention("kv_a_proj_with_mqa", "linear_kv_down_proj", ("kv_down_alone", "hidden")),
    _attention("kv_a_layernorm", "kv_layernorm", ("kv_lora",)),
    _attention("kv_b_proj", "linear_kv_up_proj", ("kv_up", "kv_lora"), axis=0),
    _attention("o_proj", "linear_proj", ("hidden", "v"), axis=1),
)
_REST = (
    Row((_HF + "post_attention_layernorm.weight",), _MCORE + "pre_mlp_layernorm.weight", Copy(("hidden",))),
    *_mlp("mlp", "ffn", "dense"),
    Row((_HF + "mlp.gate.weight",), _MCORE + "mlp.router.weight", Copy(("num_experts", "hidden")), span="moe"),
    *_mlp("mlp.shared_experts", "shared_ffn", "moe"),
    Row(
        (_HF_EXPERTS + "{e}.gate_proj.weight", _HF_EXPERTS + "{e}.up_proj.weight"),
        _EXPERT + "linear_fc1.weight",
        GateUp("moe_ffn"),
        "expert",
        engine=_HF_EXPERTS + "w13_weight[{e}]",
        is_linear=True,
        span="moe",
    ),
    Row(
        (_HF_EXPERTS + "{e}.down_proj.weight",),
        _EXPERT + "linear_fc2.weight",
        Copy(("hidden", "moe_ffn"), axis=1),
        "expert",
        engine=_HF_EXPERTS + "w2_weight[{e}]",
        is_linear=True,
        span="moe",
    ),
    FINAL_NORM,
)
_BIAS = Row((_HF + "mlp.gate.e_score_correction_bias",), _MCORE + "mlp.router.expert_bias", Copy(("num_experts",)), span="moe")

DEEPSEEK_V2 = Family((*_LATENT, *_REST), EMBEDDING, OUTPUT)
DEEPSEEK_V3 = Family((*_LATENT, *_REST, _BIAS), EMBEDDING, OUTPUT)
GLM4_MOE = Family(
    (*ATTENTION, QKV_BIAS, *qk_norms("qk_norm"), *_REST, _BIAS), EMBEDDING, OUTPUT, qkv_bias=True, engine_ties=False
)
