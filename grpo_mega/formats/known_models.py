"""Config fields of well-known models, so that a plan needs no download: those of each public config.json that a plan reads.

A model is found by its short name (`--model llama-3-70b`), by its id, or by a folder named as its id ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError

Fields = Mapping[str, Any]

_COMMON: Fields = {
    "hidden_act": "silu",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "initializer_range": 0.02,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
_LARGE: Fields = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
_LLAMA: Fields = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
}
_LLAMA_3_1: Fields = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN2: Fields = {
    **_COMMON,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
}
_QWEN3: Fields = {
    **_COMMON,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
_QWEN3_EXPERTS: Fields = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@dataclass(frozen=True)
class KnownModel:
    source: str  # its id on the Hugging Face hub
    fields: Fields


KNOWN_MODELS: Mapping[str, KnownModel] = {
    "llama-3-70b": KnownModel(
        "meta-llama/Meta-Llama-3-70B-Instruct",
        {
            **_LLAMA,
            **_LARGE,
            "intermediate_size": 28672,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
    ),
    "llama-3.1-405b": KnownModel(
        "meta-llama/Llama-3.1-405B-Instruct",
        {
            **_LLAMA,
            **_LLAMA_3_1,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
        },
    ),
    "llama-3.1-70b": KnownModel(
        "meta-llama/Llama-3.1-70B-Instruct", {**_LLAMA, **_LLAMA_3_1, **_LARGE, "intermediate_size": 28672}
    ),
    "qwen2.5-72b": KnownModel(
        "Qwen/Qwen2.5-72B-Instruct",
        {**_QWEN2, **_LARGE, "intermediate_size": 29568, "vocab_size": 152064, "sliding_window": 131072},
    ),
    "qwen2.5-1.5b": KnownModel(
        "Qwen/Qwen2.5-1.5B-Instruct",
        {
            **_QWEN2,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": KnownModel("Qwen/Qwen3-8B", _QWEN3),
    "qwen3-30b-a3b": KnownModel(
        "Qwen/Qwen3-30B-A3B",
        {
            **_QWEN3,
            **_QWEN3_EXPERTS,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3-235b-a22b": KnownModel(
        "Qwen/Qwen3-235B-A22B",
        {
            **_QWEN3,
            **_QWEN3_EXPERTS,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
        },
    ),
    "mixtral-8x7b": KnownModel(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        {
            **_COMMON,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "vocab_size": 32000,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
    ),
}


def known_model(name: str) -> KnownModel:
    """Return the model of a short name or an id. Raise ConfigError."""
    model = KNOWN_MODELS.get(name.lower()) or _by_id(name)
    if model is None:
        raise ConfigError(f"--model {name}: must be one of {', '.join(KNOWN_MODELS)}; give others by --model-config FILE")
    return model


def model_of_folder(folder: Path) -> KnownModel | None:
    """Return the model for which a folder is named, whether it exists or not."""
    return KNOWN_MODELS.get(folder.name.lower()) or _by_id(folder.name)


def _by_id(name: str) -> KnownModel | None:
    """Return the model of an id, with or without its owner."""
    wanted = name.lower()
    models = KNOWN_MODELS.values()
    return next((m for m in models if wanted in (m.source.lower(), m.source.lower().partition("/")[2])), None)
