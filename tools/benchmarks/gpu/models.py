"""Shapes of known models, for benchmarks that need no weights, and a card's peak. Numbers alone; imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_mega.weights.spec import ModelShape


def _config(model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Any:
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


# What their config.json says of their size.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": _config("qwen2", 2, 64, 128, 4, 2, 304, tie_word_embeddings=True),
    "tiny-blocks": _config("qwen2", 2, 256, 256, 2, 2, 304, tie_word_embeddings=True),  # divides into blocks of 128
    "qwen2.5-0.5b": _config("qwen2", 24, 896, 4864, 14, 2, 151936, tie_word_embeddings=True),
    "qwen2.5-1.5b": _config("qwen2", 28, 1536, 8960, 12, 2, 151936, tie_word_embeddings=True),
    "qwen3-4b": _config("qwen3", 36, 2560, 9728, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-8b": _config("qwen3", 36, 4096, 12288, 32, 8, 151936, head_dim=128),
    "llama-3.1-8b": _config("llama", 32, 4096, 14336, 32, 8, 128256, rms_norm_eps=1e-5),
}

BYTES_A_PARAMETER = 18  # of a trainer in bf16: weight, fp32 gradient, fp32 master, Adam's two moments
ROOM = 0.85  # of the free memory, for weights and activations together

# By a part of the card's name, the first that fits: dense TFLOP/s in bf16 and, where it has it, in FP8 (NVIDIA's data sheets).
PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("H100 PCIe", 756, 1513),
    ("H100 NVL", 835, 1671),
    ("H100", 989, 1979),
    ("H200", 989, 1979),
    ("GH200", 989, 1979),
    ("B200", 2250, 4500),
    ("A100", 312, None),
    ("L40S", 362, 733),
)


def shape_of(model: str, layers: int | None = None) -> ModelShape:
    shape = ModelShape.from_hf_config(MODELS[model])
    return shape if layers is None else replace(shape, num_layers=layers)


def hf_config_of(model: str, layers: int | None = None) -> Any:
    """transformers' config of the model, with another number of layers if given."""
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
    """By arithmetic: parameters with their optimizer, and the activations of a micro-batch that a layer keeps for its backward
    pass. None: all of them."""
    if free_bytes is None:
        return shape.num_layers
    room = ROOM * free_bytes - BYTES_A_PARAMETER * vocab_parameters(shape)
    kept = 2 * num_tokens * (6 * shape.hidden + 2 * (shape.q + 2 * shape.kv) + 2 * shape.q + 4 * shape.ffn)
    return max(1, min(shape.num_layers, int(room / (BYTES_A_PARAMETER * layer_parameters(shape) + kept))))


def peak_tflops(card: str, precision: str) -> float | None:
    """Dense; None for a card that the table does not have, or that does not compute in this precision."""
    for name, bf16, fp8 in PEAKS:
        if name in card:
            return bf16 if precision == "bf16" else fp8
    return None
