"""Dense decoders that name their tensors as Llama does: llama and mistral, qwen2 (q/k/v biases), qwen3 (q and k norms)."""

from __future__ import annotations

from grpo_mega.weights.ops import QKV, Copy, GateUp, Vocab
from grpo_mega.weights.spec import Family, Row

EMBEDDING = Row(("model.embed_tokens.weight",), "embedding.word_embeddings.weight", Vocab(), "first")
OUTPUT = Row(("lm_head.weight",), "output_layer.weight", Vocab(), "last")

_HF = "model.layers.{i}."
_MCORE = "decoder.layers.{i}."


def _qkv(kind: str, trailing: tuple[str, ...]) -> Row:
    names = tuple(f"{_HF}self_attn.{x}_proj.{kind}" for x in "qkv")
    return Row(
        names,
        f"{_MCORE}self_attention.linear_qkv.{kind}",
        QKV(trailing),
        engine=f"{_HF}self_attn.qkv_proj.{kind}",
        is_linear=kind == "weight",
    )


ATTENTION = (
    Row(
        (_HF + "input_layernorm.weight",),
        _MCORE + "input_layernorm.weight",
        Copy(("hidden",)),
        megatron_te=_MCORE + "self_attention.linear_qkv.layer_norm_weight",
    ),
    _qkv("weight", ("hidden",)),
    Row(
        (_HF + "self_attn.o_proj.weight",),
        _MCORE + "self_attention.linear_proj.weight",
        Copy(("hidden", "q"), axis=1),
        is_linear=True,
    ),
)
MLP = (
    Row(
        (_HF + "post_attention_layernorm.weight",),
        _MCORE + "pre_mlp_layernorm.weight",
        Copy(("hidden",)),
        megatron_te=_MCORE + "mlp.linear_fc1.layer_norm_weight",
    ),
    Row(
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        _MCORE + "mlp.linear_fc1.weight",
        GateUp(),
        engine=_HF + "mlp.gate_up_proj.weight",
        is_linear=True,
    ),
    Row(
        (_HF + "mlp.down_proj.weight",),
        _MCORE + "mlp.linear_fc2.weight",
        Copy(("hidden", "ffn"), axis=1),
        is_linear=True,
    ),
)
FINAL_NORM = Row(("model.norm.weight",), "decoder.final_layernorm.weight", Copy(("hidden",)), "last")


def qk_norms(width: str) -> tuple[Row, ...]:
    names = (((f"{_HF}self_attn.{x}_norm.weight",), f"{_MCORE}self_attention.{x}_layernorm.weight") for x in "qk")
    return tuple(Row(*each, Copy((width,))) for each in names)


QK_NORMS, QKV_BIAS = qk_norms("head_dim"), _qkv("bias", ())
BODY = (*ATTENTION, *MLP, FINAL_NORM)

LLAMA = Family(BODY, EMBEDDING, OUTPUT)
QWEN2 = Family((*BODY, QKV_BIAS), EMBEDDING, OUTPUT, qkv_bias=True)
QWEN3 = Family((*BODY, *QK_NORMS), EMBEDDING, OUTPUT, qk_norm=True)
