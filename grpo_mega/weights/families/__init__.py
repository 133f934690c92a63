"""The known families, keyed by the `model_type` of config.json. To add one, write its table in this folder and list it here."""

from __future__ import annotations

from grpo_mega.errors import WeightMappingError
from grpo_mega.weights.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from grpo_mega.weights.families.dense import LLAMA, QWEN2, QWEN3
from grpo_mega.weights.families.moe import MIXTRAL, QWEN3_MOE
from grpo_mega.weights.spec import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": GLM4_MOE,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}


def family_of(model_type: str) -> Family:
    """Return the family of a model type. Raise WeightMappingError if the model type has no table."""
    if model_type not in FAMILIES:
        raise WeightMappingError(f"model_type {model_type!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
