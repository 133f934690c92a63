"""Multi-latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1) and routing of DeepSeek's models in Megatron.

These models use Megatron's local layers on every device. Tensor parallelism needs sequence parallelism: each rank computes the
latents of its part of the sequence, and gradients of the matrices and norms that make them are summed over ranks once.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.post_training.modelopt.layers import Linear
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from grpo_mega.megatron.attention import PackedRotary, RMSNorm
from grpo_mega.megatron.routers import routers_of
from grpo_mega.weights.spec import ModelShape

BIAS = ".router.expert_bias"  # it is a buffer, so no optimizer changes it


def settings(shape: ModelShape, hf_config: Any) -> dict[str, Any]:
    """Return the fields of MLATransformerConfig that other models lack, for configs that preflight/model.py accepts."""
    rope = hf_config.rope_parameters
    return {
        "q_lora_rank": shape.q_lora or None,
        "kv_lora_rank": shape.kv_lora,
        "qk_head_dim": shape.head_dim - shape.rope_dim,
        "qk_pos_emb_head_dim": shape.rope_dim,
        "v_head_dim": shape.v_dim,
        # Megatron computes attention's scale from the two factors. Angles and their scale come from `Rotary`.
        "rope_type": "yarn",
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }


def routing(shape: ModelShape, hf_config: Any) -> dict[str, Any]:
    """Return the fields of models with shared experts. glm4_moe routes as deepseek_v3 does."""
    is_sigmoid = shape.model_type != "deepseek_v2"
    is_limited = is_sigmoid and hf_config.topk_group < hf_config.n_group
    return {
        # Layers differ, so checkpoints must store them separately. A list makes Megatron do so.
        "moe_layer_freq": [0] * shape.num_dense + [1] * (shape.num_layers - shape.num_dense) if shape.num_dense else 1,
        "moe_shared_expert_intermediate_size": shape.shared_ffn,
        "moe_router_score_function": "sigmoid" if is_sigmoid else "softmax",
        "moe_router_enable_expert_bias": is_sigmoid,
        "moe_router_num_groups": hf_config.n_group if is_limited else None,
        "moe_router_group_topk": hf_config.topk_group if is_limited else None,
        "moe_router_topk_scaling_factor": hf_config.routed_scaling_factor,
    }


def set_parts(attention: Any) -> None:
    """Replace the modules of a layer's attention that Megatron's local spec gets wrong.

    Megatron's column-parallel projections to the latents lose the other ranks' share of the gradient of the keys' rotary part:
    logits are right, gradients are wrong. modelopt's Linear is replicated on every rank.
    """
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    attention.q_layernorm = attention.kv_layernorm = RMSNorm


def set_rotary(model: GPTModel, hf_config: Any) -> None:
    """Set every layer's rotary angles from transformers' own code, including YaRN scaling."""
    theirs = LlamaRotaryEmbedding(hf_config)
    rotary = Rotary(theirs.inv_freq.float(), theirs.attention_scaling)
    for layer in model.decoder.layers:
        layer.self_attention.rotary_pos_emb = rotary


class Rotary(PackedRotary):
    """Rotary angles, and the scale of cosine and sine."""

    def __init__(self, inv_freq: Tensor, scale: float) -> None:
        super().__init__(inv_freq)
        self.scale = scale

    def forward(self, position_ids: Tensor, **kwargs: Any) -> Any:  # -> ([T, 1, rope_dim], scale)
        return super().forward(position_ids)[:, 0], self.scale


def biases_of(models: list[Any]) -> dict[str, Tensor]:
    """Return the expert biases of all routers by local name, in fp32 even if the model was cast after it was built."""
    for model in models:
        for router in routers_of(model):
            router._maintain_float32_expert_bias()
    buffers = ((f"chunk{i}.{name}", b) for i, model in enumerate(models) for name, b in model.named_buffers())
    return {name: buffer for name, buffer in buffers if name.endswith(BIAS)}
