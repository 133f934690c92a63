"""The config of `grpo-mega sft`: the schema of train, of which sft uses a part, so that one file may serve both.

sft ignores the keys of IGNORED, whatever their values, and sets the recipe sft. Its longest sample has data.max_length
tokens. The run's config.yaml has this limit as data.max_prompt_length and rollout.max_response_length, because all
other commands read it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_mega.config.base import MAX_COUNT
from grpo_mega.config.data import DataConfig

SFT = "sft"  # name of the recipe
IGNORED = (
    *("algorithm", "rewards", "rollout", "sync", "teachers", "layout.engine_ranks"),
    *("batch.epochs", "batch.mini_batches", "batch.share_prompts", "data.max_prompt_length", "data.pass_rates"),
    *("data.min_pass_rate", "data.max_pass_rate", "data.replay_fraction", "data.teacher_column"),
)


def as_sft(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict that sft validates. With data.epochs its steps may be missing, and are a large number."""
    kept = {name: dict(value) if isinstance(value, Mapping) else value for name, value in raw.items()}
    for key in IGNORED:
        section, _, name = key.partition(".")
        if not name:
            kept.pop(section, None)
        elif isinstance(kept.get(section), dict):
            kept[section].pop(name, None)
    kept["algorithm"] = {"recipe": SFT}
    if isinstance(data := kept.get("data"), dict):
        length = data.get("max_length", DataConfig.model_fields["max_length"].default)
        if isinstance(length, int) and length > 1:
            data["max_prompt_length"] = length // 2
            kept["rollout"] = {"max_response_length": length - length // 2}
        if data.get("epochs") is not None:
            kept["steps"] = MAX_COUNT
    return kept
