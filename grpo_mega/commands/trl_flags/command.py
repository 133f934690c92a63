"""`python -m grpo_mega.grpo FLAGS`: make the config that `grpo-mega train` would read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_mega import config as configs
from grpo_mega.commands.trl_flags import sources
from grpo_mega.commands.trl_flags.flags import Values, parse
from grpo_mega.commands.trl_flags.values import Raw, to_raw
from grpo_mega.config import Config
from grpo_mega.errors import ConfigError
from grpo_mega.paths import user_path


@dataclass(frozen=True)
class TrainRequest:
    config: Config
    resume: bool
    notes: list[str]  # lines for the user


def read(arguments: Sequence[str], environ: Mapping[str, str], *, is_cached: bool) -> TrainRequest:
    """Return the flags' config, after downloading the model if necessary. Raise ConfigError.

    Under torchrun, the number of data-parallel ranks follows from WORLD_SIZE in `environ`. `is_cached`: the parent process has
    already downloaded the model.
    """
    values, notes = parse(arguments)
    train = sources.find_data(values["dataset_name"], values.get("dataset_config"), values.get("dataset_train_split"))
    raw = to_raw(values, data_parallel_size(values, environ), lambda: sources.count_rows(train))
    _put_data(values, train, raw)
    raw.setdefault("model", {})["path"] = values["model_name_or_path"]
    for override in values.get("set", []):
        configs.apply_override(raw, override)
    config = configs.validate(raw)  # raises before anything is downloaded
    if evaluates(values) and not has_heldout(config):
        raise ConfigError(
            f"--eval_steps {values['eval_steps']} has nothing to evaluate on; name --dataset_test_split, or set data.heldout "
            "or data.heldout_size by --set"
        )
    model = sources.find_model(str(config.model.path), values.get("model_revision"), is_cached=is_cached)
    raw["model"]["path"] = str(model)
    if values.get("dtype") == "auto" and "dtype" not in raw["model"]:
        raw["model"]["dtype"] = sources.own_dtype(model)
    resume = values.get("resume") or values.get("resume_from_checkpoint", False)
    return TrainRequest(configs.validate(raw), resume, notes)


def data_parallel_size(values: Values, environ: Mapping[str, str]) -> int:
    """Return --data_parallel, or torchrun's ranks divided by the sizes of the other dimensions."""
    world_size = environ.get("WORLD_SIZE", "")
    if "data_parallel" in values or not world_size.isdecimal():
        return int(max(1, values.get("data_parallel", 1)))
    ranks = max(1, values.get("tensor_parallel", 1)) * max(1, values.get("pipeline_parallel", 1))
    return max(1, int(world_size) // ranks)


def evaluates(values: Values) -> bool:
    return "eval_steps" in values and values.get("eval_strategy") != "no"


def has_heldout(config: Config) -> bool:
    data = config.data
    return bool(data.heldout_sources) or data.heldout_size is not None or data.heldout_fraction is not None


def _put_data(values: Values, train: str, raw: Raw) -> None:
    data = raw.setdefault("data", {})
    data["train"] = train
    if "prompt_column" not in data and (column := sources.find_prompt_column(train)):
        data["prompt_column"] = column
    has_splits = train.startswith("hub:") or user_path(values["dataset_name"]).is_dir()
    split = values.get("dataset_test_split", "test" if evaluates(values) and has_splits else None)
    if split is not None:
        data["heldout"] = sources.find_data(values["dataset_name"], values.get("dataset_config"), split)
