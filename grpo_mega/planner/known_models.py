"""The model of a plan, which needs no download for well-known models.

`known_models.json` has the fields of public config.json files that plans read. A model is found by its short name
(`--model llama-3-70b`), by its id on the Hugging Face hub, or by a folder named like the end of its id.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_mega.config import Config
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.formats.hf_files import adapter_problem
from grpo_mega.paths import MAX_JSON_BYTES, parse_json, read_file
from grpo_mega.preflight.model import Model, model_of, read_model
from grpo_mega.weights.spec import ModelShape, read_config


class KnownModel(NamedTuple):
    source: str  # model id on the Hugging Face hub
    fields: dict[str, Any]


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
KNOWN_MODELS = {name: KnownModel(**model) for name, model in _TABLE.items()}


def read_planned_model(config: Config, model_config: Path | None = None, name: str | None = None) -> Model:
    """Read the model from `model_config` (a config.json or its folder), from a well-known `name`, or from model.path.

    If model.path has no config.json, use the well-known model that its folder is named after. Raise ConfigError or
    WeightMappingError.
    """
    folder = config.model.path
    if model_config is not None and model_config.is_dir():
        return model_of(read_config(model_config))
    if model_config is not None:
        given = f"--model-config {model_config}"
        try:
            fields = parse_json(read_file(model_config, MAX_JSON_BYTES).decode("utf-8-sig"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{given} cannot be read as JSON ({error}); name a model's config.json") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{given} holds a JSON {type(fields).__name__}; name a model's config.json")
        return model_of(fields)
    if name is not None:
        return model_of(known_model(name).fields)
    if adapter_problem(folder) is not None or (folder / "config.json").is_file():
        return read_model(config)
    known = find_known_model(folder.name)
    if known is None:
        raise ConfigError(
            f"model.path={folder} holds no config.json here; name the folder of a Hugging Face checkpoint, "
            f"or plan with --model NAME ({', '.join(KNOWN_MODELS)}) or --model-config FILE"
        )
    note = (
        f"model.path={folder} is not here: planned with the fields of {known.source}'s config.json; --model names"
        " others"
    )
    return replace(model_of(known.fields), note=note)


def known_model(name: str) -> KnownModel:
    """Return the model with a short name or an id. Raise ConfigError."""
    model = find_known_model(name)
    if model is None:
        raise ConfigError(
            f"--model {name}: must be one of {', '.join(KNOWN_MODELS)}; use --model-config FILE for another model"
        )
    return model


def find_known_model(name: str) -> KnownModel | None:
    """Return the model with a short name, or an id with or without the owner."""
    ids = {model.source.lower(): model for model in KNOWN_MODELS.values()}
    ids |= {source.partition("/")[2]: model for source, model in ids.items()}
    return (KNOWN_MODELS | ids).get(name.lower())


def read_teachers(config: Config, notes: list[str]) -> tuple[tuple[ModelShape, int], ...]:
    """Return the shapes of the teachers that are here or well known. Add a note for each of the others."""
    found: list[tuple[ModelShape, int]] = []
    for name, teacher in [pair for pair in config.teachers.items() if pair[1].url is None]:
        own = config.model_copy(update={"model": config.model.model_copy(update={"path": teacher.path})})
        try:
            model = read_planned_model(own)
            found.append((model.shape, model.experts_per_token))
        except UserError:
            notes.append(f"teachers.{name}.path={teacher.path} cannot be read here: planned without it")
    return tuple(found)
