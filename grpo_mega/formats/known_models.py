"""Config fields of well-known models, so that a plan needs no download: the fields of public config.json files that plans read.

The fields are in `known_models.json`. A model is found by its short name (`--model llama-3-70b`), by its id on the Hugging Face
hub, or by a folder named like the end of its id.
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
    source: str  # model id on the Hugging Face hub
    fields: Mapping[str, Any]


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
KNOWN_MODELS: Mapping[str, KnownModel] = {name: KnownModel(**model) for name, model in _TABLE.items()}


def known_model(name: str) -> KnownModel:
    """Return the model with a short name or an id. Raise ConfigError."""
    model = KNOWN_MODELS.get(name.lower()) or _by_id(name)
    if model is None:
        raise ConfigError(
            f"--model {name}: must be one of {', '.join(KNOWN_MODELS)}; use --model-config FILE for another model"
        )
    return model


def model_of_folder(folder: Path) -> KnownModel | None:
    """Return the model that a folder is named after, whether the folder exists or not."""
    return KNOWN_MODELS.get(folder.name.lower()) or _by_id(folder.name)


def _by_id(name: str) -> KnownModel | None:
    """Return the model with an id, with or without the owner."""
    wanted = name.lower()
    models = KNOWN_MODELS.values()
    return next((m for m in models if wanted in (m.source.lower(), m.source.lower().partition("/")[2])), None)
