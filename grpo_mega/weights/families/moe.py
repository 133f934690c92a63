"""MoE models: Llama's attention with a router and experts instead of the MLP. qwen3_moe (q and k norms) and mixtral.

Megatron's names are the names in SequentialMLP, where each expert is a separate module; layout.py derives TEGroupedMLP's names.
The engine has one parameter, [experts, ...], for the same part of all experts of a layer. The part of a rank's e-th expert is
"parameter[e]" here. Its layout is the layout of SGLang's Triton kernels.
"""

from __future__ import annotations

from grpo_mega.weights.families.dense import ATTENTION, EMBEDDING, FINAL_NORM, OUTPUT, QK_NORMS
from grpo_mega.weights.ops import Copy, GateUp
from grpo_mega.weights.spec import Family, Row

_HF = "model.layers.{i}."
_MCORE = "decoder.layers.{i}."
_EXPERT = _MCORE + "mlp.experts.local_experts.{e}."


def _moe_layer(block: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Return the rows of a layer's router and experts, given the Hugging Face names of the MoE block and an expert's parts."""
    experts = f"{_HF}{block}.experts."
    return (
        Row((_HF + "post_attention_layernorm.weight",), _MCORE + "pre_mlp_layernorm.weight", Copy(("hidden",))),
        Row((f"{_HF}{block}.gate.weight",), _MCORE + "mlp.router.weight", Copy(("num_experts", "hidden"))),
        Row(
            (f"{experts}{{e}}.{gate}.weight", f"{experts}{{e}}.{up}.weight"),
            _EXPERT + "linear_fc1.weight",
            GateUp("moe_ffn"),
            "expert",
            engine=experts + "w13_weight[{e}]",
            is_linear=True,
        ),
        Row(
            (f"{experts}{{e}}.{down}.weight",),
            _EXPERT + "linear_fc2.weight",
            Copy(("hidden", "moe_ffn"), axis=1),
            "expert",
            engine=experts + "w2_weight[{e}]",
            is_linear=True,
        ),
    )


QWEN3_MOE = Family(
    (*ATTENTION, *_moe_layer("mlp", "gate_proj", "up_proj", "down_proj"), FINAL_NORM, *QK_NORMS),
    EMBEDDING,
    OUTPUT,
    qk_norm=True,
    engine_ties=False,
)
MIXTRAL = Family(
    (*ATTENTION, *_moe_layer("block_sparse_moe", "w1", "w3", "w2"), FINAL_NORM), EMBEDDING, OUTPUT, engine_ties=False
)
