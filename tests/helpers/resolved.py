"""Compare two readings of a config.json."""

from __future__ import annotations

from typing import Any

from grpo_mega.weights.families import family_of
from grpo_mega.weights.hf_config import attention_windows


def difference(model_type: str, ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return the first field with different values in two resolved configs of a model type; None if there is none."""
    for name in (*family_of(model_type).declared, "head_dim", "rope_parameters"):
        if ours.get(name) != theirs.get(name) and name != "layer_types":
            return f"{name} is {theirs.get(name)!r} for transformers, not {ours.get(name)!r}"
    if attention_windows(ours) != attention_windows(theirs):
        return f"the layers' windows are {attention_windows(theirs)} for transformers, not {attention_windows(ours)}"
    return None
