"""Rules for `model`: its files, and settings that do not fit it. Needs no torch.

A plan needs no download for well-known models. `known_models.json` has the fields of public config.json files that
plans read. A model is found by its short name (`--model llama-3-70b`), by its id on the Hugging Face hub, or by a
folder named like the end of its id.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_mega.checkpoint_io import adapter
from grpo_mega.checkpoint_io.dcp_read import is_distributed_checkpoint
from grpo_mega.checkpoint_io.hf_files import adapter_problem, weight_files
from grpo_mega.checkpoint_io.hf_weights import HfWeights, check_tied
from grpo_mega.checkpoint_io.megatron_weights import MegatronWeights
from grpo_mega.config import Config, ModelConfig
from grpo_mega.config.base import broken_rules
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.paths import CONFIG_FILE, EXPORT_DIR, MAX_JSON_BYTES, hub_hint, parse_json, read_file
from grpo_mega.weights.architecture import experts_per_token, shape_of
from grpo_mega.weights.derived import adapter_family, merge_reason
from grpo_mega.weights.families import family_of
from grpo_mega.weights.hf_config import resolve_config
from grpo_mega.weights.spec import ModelShape, read_config


@dataclass(frozen=True)
class Model:
    shape: ModelShape
    experts_per_token: int  # 0 for a dense model
    fields: dict[str, Any]  # resolved fields of config.json
    is_here: bool = False  # True if the model is in model.path, so its other files can be checked too
    note: str | None = None  # source of the fields if it is not model.path


def read_model(config: Config) -> Model:
    """Read the model in model.path. Raise ConfigError or WeightMappingError."""
    return _read_folder(config.model.path)


def check_model_files(model: ModelConfig) -> ModelShape:
    """Return the shape of a model with a valid config.json and valid weights. Raise ConfigError or
    WeightMappingError.
    """
    shape = _read_folder(model.path).shape
    if model.init == "checkpoint":
        check_weights(model.path, shape)
    return shape


def _read_folder(folder: Path) -> Model:
    """Read the model in a folder with a valid config.json."""
    if not folder.is_dir():
        raise ConfigError(
            f"model.path={folder} is not a folder; name the folder of a Hugging Face checkpoint{hub_hint(folder)}"
        )
    if (problem := adapter_problem(folder)) is not None:
        raise ConfigError(f"model.path={folder} {problem}")
    if not (folder / "config.json").is_file():
        remedy = "name the folder of a Hugging Face checkpoint"
        if (folder / EXPORT_DIR / "config.json").is_file():
            remedy = f"it is a run's folder, so name its policy, {folder / EXPORT_DIR}"
        elif (folder / CONFIG_FILE).is_file():
            remedy = (
                f"it is a run's folder, so write its policy to a folder by `grpo-mega export {folder} OUT`, and name"
                " that"
            )
        raise ConfigError(f"model.path={folder} holds no config.json; {remedy}")
    return replace(model_of(read_config(folder)), is_here=True)


def model_of(raw: Mapping[str, Any]) -> Model:
    """Return the model with these fields of a config.json. Raise ConfigError or WeightMappingError."""
    fields = resolve_config(raw)
    shape = shape_of(fields)
    return Model(shape, experts_per_token(fields) if shape.num_experts else 0, fields)


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Raise WeightMappingError unless the folder's weights are complete and fit the model."""
    family = family_of(shape.model_type)
    if is_distributed_checkpoint(folder):
        MegatronWeights(folder, family, shape).close()
    else:
        weight_files(folder)  # refuses other formats
        weights = HfWeights(folder, {})
        weights.check(family.hf_tensors(shape))
        if shape.tied:
            check_tied(folder, family.output.hf[0], family.embedding.hf[0], weights.tensors)


def lora_problems(model: ModelConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a target of model.lora that the model lacks, and problems of the adapter to start from."""
    try:
        if model.lora is not None:
            family = adapter_family(family_of(shape.model_type), shape, model.lora.rank, model.lora.targets)
            if model.adapter is not None:
                adapter.check(model.adapter, model.lora, family.hf_tensors(shape))
    except UserError as error:
        yield from error.lines


def sync_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield why sync.lora does not fit the engine or the model."""
    if config.sync.lora == "adapter" and (reason := merge_reason(config.rollout, shape)):
        yield f"sync.lora='adapter': must be merged {reason}; leave it out"


def fact_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """Yield keys whose rules exclude the model, or need another one."""
    return broken_rules(config, facts_of(shape, is_served=config.rollout.is_served), shape.model_type)


def facts_of(shape: ModelShape, *, is_served: bool) -> dict[str, object]:
    """Return the facts about a model that rules of keys name."""
    family, is_moe = family_of(shape.model_type), bool(shape.num_experts)
    return {
        "a model with experts": is_moe,
        "a dense model": not is_moe,
        "a bias per expert": not is_moe or family.has_router_bias,
        "a sliding window": bool(shape.windows),
        "linear attention": bool(shape.linear_layers),
        "missing support in SGLang": is_served and family.served_by is None,
        "latent attention in SGLang": bool(shape.kv_lora) and is_served,
    }


def position_problems(config: Config, fields: dict[str, Any]) -> Iterator[str]:
    """Yield problems if the model lacks positions for the longest sample (prompt and response), or differs in the
    engine.
    """
    rope = fields["rope_parameters"]
    if config.rollout.is_served and rope.get("mscale_all_dim") and not rope.get("mscale"):
        yield (
            f"config.json has mscale_all_dim={rope['mscale_all_dim']:g} without mscale, which SGLang and transformers"
            " read differently; add mscale, or set rollout.engine=embedded"
        )
    longest_sample = config.data.max_prompt_length + config.rollout.max_response_length
    positions = num_positions(fields)
    if longest_sample > positions:
        yield (
            f"{config.algorithm.length_keys}={longest_sample}: must be at most the model's"
            f" max_position_embeddings={positions}; lower {'it' if config.algorithm.is_sft else 'one of them'}"
        )


def num_positions(fields: dict[str, Any]) -> int:
    """Return the number of positions of a model."""
    positions, rope = fields["max_position_embeddings"], fields["rope_parameters"]
    return int(positions * rope.get("factor", 1)) if rope["rope_type"] == "linear" else positions


class KnownModel(NamedTuple):
    source: str  # model id on the Hugging Face hub
    fields: dict[str, Any]


_TABLE = json.loads(Path(__file__).with_name("known_models.json").read_text(encoding="utf-8"))
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
