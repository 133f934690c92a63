"""Every rule that a config breaks, each with its remedy, by the functions that training itself asks.

What only this machine lacks (weights, tokenizer, data, SGLang, Transformer Engine) is a note: a plan may be made on a laptop.
What is here and broken is a violation as it would be for training.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_mega.config import Config
from grpo_mega.data.load import check_data
from grpo_mega.errors import ConfigError, UserError
from grpo_mega.formats.hf_files import WEIGHT_SUFFIXES
from grpo_mega.formats.known_models import KNOWN_MODELS, known_model, model_of_folder
from grpo_mega.hardware.cards import Card
from grpo_mega.hardware.fp8 import (
    bf16_layer_problems,
    check_blocks,
    check_card,
    check_cuda,
    check_moments,
    check_served_card,
    check_transformer_engine,
)
from grpo_mega.hardware.kernels import (
    check_apex,
    check_attention,
    cuda_version,
    flash_attention_version,
    transformer_engine_version,
)
from grpo_mega.validation import preflight
from grpo_mega.validation.architecture import experts_per_token
from grpo_mega.validation.tokenizer import check_tokenizer_files
from grpo_mega.weights.spec import ModelShape, read_config


@dataclass
class Findings:
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, problem: str) -> None:
        """Once each; two checks may find the same, with another remedy."""
        if all(problem.partition(";")[0] != known.partition(";")[0] for known in self.violations):
            self.violations.append(problem)

    def take(self, other: Findings) -> None:
        for problem in other.violations:
            self.add(problem)
        self.notes += other.notes

    def run(self, check: Callable[[], object]) -> None:
        try:
            check()
        except UserError as error:
            self.add(" ".join(str(error).split()))


@dataclass(frozen=True)
class Model:
    shape: ModelShape
    experts_per_token: int
    fields: dict[str, Any]  # of its config.json
    is_here: bool  # in model.path, of which the other files can be checked too
    note: str | None = None  # where the fields come from, if not from where one would look first


def read_model(config: Config, model_config: Path | None = None, name: str | None = None) -> Model:
    """Read the model from `model_config`, a config.json or its folder, or as the well-known one of a name; else from
    model.path, or, where there is no config.json, as the well-known model for which that folder is named.

    Raises ConfigError or WeightMappingError.
    """
    folder, note = config.model.path, None
    is_here = model_config is None and name is None and (folder / "config.json").is_file()
    if model_config is not None:
        fields = _read_fields(model_config)
    elif name is not None:
        fields = dict(known_model(name).fields)
    elif is_here:
        fields = read_config(folder)
    else:
        known = model_of_folder(folder)
        if known is None:
            raise ConfigError(
                f"model.path={folder} holds no config.json here; name the folder of a Hugging Face checkpoint, "
                f"or plan with --model NAME ({', '.join(KNOWN_MODELS)}) or --model-config FILE"
            )
        fields = dict(known.fields)
        note = f"model.path={folder} is not here: planned with the fields of {known.source}'s config.json; --model names others"
    shape = preflight.check_fields(fields)
    return Model(shape, experts_per_token(fields) if shape.num_experts else 0, fields, is_here, note)


def _read_fields(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return read_config(path)
    try:
        fields = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model-config {path} cannot be read as JSON ({error}); name a model's config.json") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"--model-config {path} holds a JSON {type(fields).__name__}; name a model's config.json")
    return fields


def rules(config: Config, shape: ModelShape | None, card: Card, world_size: int, gpus_per_node: int) -> list[str]:
    """Every broken rule that neither this machine nor any file decides; empty where training would begin.

    Without a shape only those that the model has no part in.
    """
    found = Findings()
    layout = config.layout
    for problem in preflight.world_size_problems(layout, world_size):
        found.add(problem)
    found.run(lambda: check_card(config.precision, card.capability, card.title))
    if shape is not None:
        for problem in (*preflight.layout_problems(layout, shape), *preflight.engine_problems(config.rollout, layout, shape)):
            found.add(problem)
        for problem in bf16_layer_problems(config.precision, layout, shape.num_layers):
            found.add(problem)
        found.run(lambda: check_blocks(config.precision, layout, shape))
    if config.rollout.engine == "sglang":
        found.run(lambda: check_served_card(config.rollout, config.model.dtype, card.capability, card.title))
        for problem in preflight.engine_rank_problems(config.rollout.tp, world_size, min(world_size, gpus_per_node)):
            found.add(problem)
    return found.violations


def settings(config: Config, card: Card) -> Findings:
    """What is wrong with rewards and data, and what this machine lacks."""
    found = Findings()
    for function in config.rewards.functions:
        found.run(lambda function=function: preflight.check_reward(function, config.rewards))  # type: ignore[misc]
    sources = [*config.data.train, *config.data.heldout_sources.values()]
    missing = [source.path for source in sources if source.path.startswith("hub:") or not _exists(source.path)]
    if missing:
        found.notes.append(f"data not on this machine, not checked: {', '.join(missing)}")
    else:
        found.run(lambda: check_data(config.data, config.batch.prompts_per_step, config.rollout))
    found.notes += _installed(config, card)
    return found


def model_files(config: Config, shape: ModelShape) -> Findings:
    """What is wrong with the weights and the tokenizer in model.path, which holds at least a config.json."""
    found, folder = Findings(), config.model.path
    if config.model.init == "checkpoint":
        if any(path.name.endswith(WEIGHT_SUFFIXES) for path in folder.iterdir()):
            found.run(lambda: preflight.check_weights(folder, shape))
        else:
            found.notes.append(f"model.path={folder} has no weights here: not checked")
    if any(path.name.startswith(("tokenizer", "vocab")) for path in folder.iterdir()):
        found.run(lambda: check_tokenizer_files(folder, shape.vocab))
    else:
        found.notes.append(f"model.path={folder} has no tokenizer here: not checked")
    return found


def _installed(config: Config, card: Card) -> list[str]:
    """What training would miss here."""
    notes = []
    if config.rollout.engine == "sglang" and importlib.util.find_spec("sglang") is None:
        notes.append("SGLang is not installed here; training needs it for rollout.engine=sglang")
    for check in (
        check_apex,
        lambda: check_transformer_engine(config.precision, transformer_engine_version()),
        lambda: check_cuda(config.precision, cuda_version()),
        lambda: check_moments(config.optimizer, transformer_engine_version()),
        lambda: check_attention(
            config.model.dtype,
            card.capability,
            card.title,
            transformer_engine=transformer_engine_version(),
            flash_attn=flash_attention_version(),
        ),
    ):
        try:
            check()
        except ConfigError as error:
            notes.append(f"here: {error}")
    return notes


def _exists(path: str) -> bool:
    return Path(path).exists() or Path(path.rpartition("@")[0] or path).is_dir()
