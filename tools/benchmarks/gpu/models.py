"""Shapes of known models for benchmarks without weights, and peak FLOP/s of cards. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_mega.cli.checks.machine import CARDS
from grpo_mega.weights.spec import ModelShape


def config_fields(
    model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any
) -> Any:
    """Return the fields of a config.json."""
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        **more,
    }


# The sizes in each model's config.json.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": config_fields("qwen2", 2, 64, 128, 4, 2, 304, tie_word_embeddings=True),
    "tiny-blocks": config_fields(
        "qwen2", 2, 256, 256, 2, 2, 304, tie_word_embeddings=True
    ),  # sizes divide into FP8 blocks
    "qwen2.5-0.5b": config_fields("qwen2", 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": config_fields("qwen2", 28, 1536, 8960, 12, 2, 151936, tie_word_embeddings=True),
    "qwen3-4b": config_fields("qwen3", 36, 2560, 9728, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": config_fields("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "llama-160m": config_fields("llama", 12, 768, 3072, 12, 12, 32000),
    "llama-3.1-8b": config_fields("llama", 32, 4096, 14336, 32, 8, 128256, rms_norm_eps=1e-5),
    "llama-70b": config_fields("llama", 80, 8192, 28672, 64, 8, 128256),
    "qwen3-235b": config_fields(
        "qwen3_moe", 94, 4096, 12288, 64, 4, 151936, head_dim=128, moe_intermediate_size=1536, num_experts=128
    ),
}

BYTES_A_PARAMETER = 18  # trainer in bf16: weight, fp32 gradient, fp32 master weight, Adam's two moments
ROOM = 0.85  # share of free memory for weights and activations

# Dense TFLOP/s in bf16, and in FP8 or None. The first entry whose name is part of the card's name counts. Variants of a
# card come first; their peaks are from NVIDIA's data sheets, too.
PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("H100 PCIe", 756, 1513),
    ("H100 NVL", 835, 1671),
    ("L40S", 362, 733),
    *((name.upper(), card.bf16_flops / 1e12, card.fp8_flops / 1e12 or None) for name, card in CARDS.items()),
)


def shape_of(model: str, layers: int | None = None) -> ModelShape:
    shape = ModelShape.from_hf_config(MODELS[model])
    return shape if layers is None else replace(shape, num_layers=layers)


def hf_config_of(model: str, layers: int | None = None) -> Any:
    """Return transformers' config of the model, with `layers` layers if given."""
    from transformers import AutoConfig

    fields = MODELS[model] | ({} if layers is None else {"num_hidden_layers": layers})
    return AutoConfig.for_model(**fields)


def layer_parameters(shape: ModelShape) -> int:
    """Return the number of parameters in one layer's matrices."""
    return shape.hidden * (2 * shape.q + 2 * shape.kv + 3 * shape.ffn)


def vocab_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the embedding and the output layer."""
    return shape.vocab * shape.hidden * (1 if shape.tied else 2)


def layers_that_fit(shape: ModelShape, num_tokens: int, free_bytes: int | None) -> int:
    """Return the number of layers that fit. If `free_bytes` is None, return all layers.

    Count parameters with their optimizer state, and the activations that a layer keeps for its backward pass."""
    if free_bytes is None:
        return shape.num_layers
    room = ROOM * free_bytes - BYTES_A_PARAMETER * vocab_parameters(shape)
    kept = 2 * num_tokens * (6 * shape.hidden + 2 * (shape.q + 2 * shape.kv) + 2 * shape.q + 4 * shape.ffn)
    return max(1, min(shape.num_layers, int(room / (BYTES_A_PARAMETER * layer_parameters(shape) + kept))))


def peak_tflops(card: str, precision: str) -> float | None:
    """Return the dense peak; None for an unknown card, or a card without this precision."""
    for name, bf16, fp8 in PEAKS:
        if name in card:
            return bf16 if precision == "bf16" else fp8
    return None
