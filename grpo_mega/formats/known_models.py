"""Config fields of well-known models, so that a plan needs no download: the part of each public config.json that a plan reads.

`known_models.json` has them. A model is found by its short name (`--model llama-3-70b`), by its id on the Hugging Face hub, or
by a folder that is named like the end of its id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError


@dataclass(frozen=True)
class KnownModel:
    source: str  # its id on the Hugging Face hub
    fields: Mapping[str, Any]


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
KNOWN_MODELS: Mapping[str, KnownModel] = {name: KnownModel(**model) for name, model in _TABLE.items()}


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
