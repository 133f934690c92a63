"""The section `data` of the config: which data sets, and which of their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from grpo_mega.config_base import PositiveFloat, PositiveInt, Section


class DataSource(Section):
    """One data set, wherever it lies; see data/sources.py for what a path may be."""

    path: Annotated[str, Field(min_length=1)]  # .jsonl, .json, .parquet, a folder of these, or hub:owner/name[:config][@split]
    prompt_column: str | None = None  # None: data.prompt_column
    answer_column: str | None = None  # None: data.answer_column


class TrainSource(DataSource):
    weight: PositiveFloat = 1.0  # its share of every step is weight / sum of weights


class DataConfig(Section):
    train: tuple[TrainSource, ...]  # in YAML also a path, or a list of paths
    heldout: DataSource | None = None  # in YAML also a path
    heldout_size: PositiveInt | None = None  # prompts split off from train, which are never trained on
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None  # likewise, as a share of train
    prompt_column: str = "prompt"
    answer_column: str | None = None  # None: "answer" where a data set has it, else "solution"
    system_prompt: str | None = None
    max_prompt_length: PositiveInt = 1024  # tokens; longer prompts are dropped and counted
    shuffle: bool = True

    @field_validator("train", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [_as_source(v) for v in value] if isinstance(value, (list, tuple)) else [_as_source(value)]

    @field_validator("heldout", mode="before")
    @classmethod
    def _as_mapping(cls, value: Any) -> Any:
        return _as_source(value)

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        paths = [source.path for source in self.train]
        if not paths:
            raise ValueError("data.train=[] is empty; name at least one data set")
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"data.train names {path!r} twice; give it once, with its total weight")
        heldout = {
            "data.heldout": self.heldout and self.heldout.path,
            "data.heldout_size": self.heldout_size,
            "data.heldout_fraction": self.heldout_fraction,
        }
        given = [f"{key}={value}" for key, value in heldout.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are set; give one of them")
        return self


def _as_source(value: Any) -> Any:
    return {"path": str(value)} if isinstance(value, (str, Path)) else value
