"""The section `data` of the config: which data sets, and which of their columns."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from grpo_mega.config.base import LIST, FilePath, PositiveFloat, PositiveInt, Section
from grpo_mega.text import find_surrogate


class DataSource(Section):
    """One data set; data/sources.py describes the forms of a path. In YAML the path alone may stand for it."""

    is_text_too: ClassVar[bool] = True

    path: Annotated[str, Field(min_length=1)]  # .jsonl, .json, .parquet, a folder of these, or hub:owner/name[:config][@split]
    prompt_column: str | None = None  # None: data.prompt_column
    answer_column: str | None = None  # None: data.answer_column

    @field_validator("path")
    @classmethod
    def _expand(cls, value: str) -> str:
        return os.path.expanduser(value)

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, (str, Path)) else value


class TrainSource(DataSource):
    weight: PositiveFloat = 1.0  # its share of every step is weight / sum of weights


class DataConfig(Section):
    train: Annotated[tuple[TrainSource, ...], LIST]  # in YAML also a path, or a list of paths
    heldout: DataSource | None = None  # in YAML also a path
    heldout_sets: dict[str, DataSource] = Field(default={})  # in place of heldout: several sets, by the names in their metrics
    heldout_size: PositiveInt | None = None  # number of prompts split off from train, never trained on
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None  # the same, as a share of train
    prompt_column: str = "prompt"
    answer_column: str | None = None  # None: "answer" where a data set has it, else "solution"
    teacher_column: str | None = None  # the column that names each row's teacher, one of `teachers`; None: there is one
    system_prompt: str | None = None
    max_prompt_length: PositiveInt = 1024  # tokens; longer prompts are dropped and counted
    shuffle: bool = True
    replay_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1  # of earlier iterations' samples, for rewards.refresh_command
    pass_rates: FilePath | None = None  # file from `grpo-mega eval --train-set --samples N --out FILE`
    min_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None  # drop prompts of data.train with a lower pass rate
    max_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = None  # drop those with a higher one

    @property
    def heldout_sources(self) -> dict[str, DataSource]:
        """The held-out sets by name; that of data.heldout has the name ""."""
        return {"": self.heldout} if self.heldout is not None else self.heldout_sets

    @field_validator("system_prompt")
    @classmethod
    def _check_system_prompt(cls, value: str | None) -> str | None:
        if surrogate := find_surrogate(value):
            raise ValueError(
                f"data.system_prompt has the lone surrogate {surrogate}, which is no character; write U+FFFD in its place"
            )
        return value

    @field_validator("train", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return value if isinstance(value, (list, tuple)) else [value]

    @model_validator(mode="after")
    def _check_pass_rates(self) -> DataConfig:
        low, high = self.min_pass_rate, self.max_pass_rate
        if self.pass_rates is not None and low is None and high is None:
            raise ValueError(
                f"data.pass_rates={self.pass_rates} needs a limit; set data.min_pass_rate, for example to 0.01, "
                "data.max_pass_rate, for example to 0.99, or both"
            )
        for name, limit in (("min_pass_rate", low), ("max_pass_rate", high)):
            if self.pass_rates is None and limit is not None:
                raise ValueError(f"data.{name}={limit} needs data.pass_rates, the file of pass rates; see data/pass_rates.py")
        if low is not None and high is not None and low > high:
            raise ValueError(f"data.min_pass_rate={low} is above data.max_pass_rate={high}; lower it")
        return self

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
            "data.heldout_sets": ", ".join(self.heldout_sets) or None,
            "data.heldout_size": self.heldout_size,
            "data.heldout_fraction": self.heldout_fraction,
        }
        given = [f"{key}={value}" for key, value in heldout.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are set; give one of them")
        for name in self.heldout_sets:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"data.heldout_sets has the name {name!r}; use letters, digits, '.', '_' and '-'")
        return self
