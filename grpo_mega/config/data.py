"""The sections `data` and `rewards` of the config, and the config of `grpo-mega sft`.

cli/checks/ checks names and options of reward functions, and imports the user's own functions in a child process.
sft uses a part of the schema of train, so one file may serve both. It ignores the keys of IGNORED, whatever their
values, and sets the recipe sft. Its longest sample has data.max_length tokens. The run's config.yaml has this limit as
data.max_prompt_length and rollout.max_response_length, because all other commands read it there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from grpo_mega.config.base import (
    LIST,
    MAX_COUNT,
    FilePath,
    Number,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    check_named,
    free,
    ruled,
)
from grpo_mega.text import find_surrogate

_PASS_RATES = "data.pass_rates, the file of pass rates; write it with grpo-mega eval CONFIG --train-set"


class DataSource(Section):
    """One dataset; data/rows.py describes the forms of a path. In YAML a plain path may replace it."""

    is_text_too: ClassVar[bool] = True

    path: Annotated[str, Field(min_length=1)] = Field(
        description="A .jsonl, .json or .parquet file, a folder of such files, or hub:owner/name[:config][@split]."
    )
    prompt_column: str | None = Field(
        default=None, description="Column of the prompts in this dataset. None uses data.prompt_column."
    )
    answer_column: str | None = Field(
        default=None, description="Column of the gold answers in this dataset. None uses data.answer_column."
    )

    @field_validator("path")
    @classmethod
    def _expand(cls, value: str) -> str:
        check_named(Path(value))
        return os.path.expanduser(value)

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": str(value)} if isinstance(value, (str, Path)) else value


class TrainSource(DataSource):
    weight: PositiveFloat = Field(
        default=1.0, description="Weight of this dataset. Its share of every step is weight / sum of all weights."
    )


class DataConfig(Section):
    train: Annotated[tuple[TrainSource, ...], LIST] = Field(
        description="Training data: a path, a list of paths, or a list of sources with weights."
    )
    heldout: DataSource | None = ruled(
        excludes="data.heldout_sets or data.heldout_size or data.heldout_fraction; give one of them",
        default=None,
        description="Held-out data for evaluation. None means no held-out set of this kind.",
    )
    heldout_sets: dict[str, DataSource] = ruled(
        excludes="data.heldout_size or data.heldout_fraction; give one of them",
        default={},
        description="Several held-out sets, by the names of their metrics. Used instead of heldout.",
    )
    heldout_size: PositiveInt | None = ruled(
        excludes="data.heldout_fraction; give one of them",
        default=None,
        description="Number of prompts to split off from train as a held-out set. They are never trained on.",
    )
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Share of train to split off as a held-out set, between 0 and 1. They are never trained on.",
    )
    prompt_column: str | None = Field(
        default=None,
        description=(
            "Column of the prompts: text, or a list of chat messages. None uses the first of prompt, problem and "
            "question that the data has. A dot reaches into nested columns."
        ),
    )
    answer_column: str | None = Field(
        default=None,
        description=(
            "Column of the gold answers. None uses the first of answer, solution and reward_model.ground_truth that "
            "the data has. A dot reaches into nested columns."
        ),
    )
    messages_column: str | None = Field(
        default=None,
        description=(
            "Used by sft. Column of chats, whose assistant messages are all trained. None uses messages if the data "
            "has it and completion_column is None, or else prompt_column and completion_column."
        ),
    )
    completion_column: str | None = Field(
        default=None,
        description=(
            "Used by sft. Column of the completions of the prompts: text, or a list of chat messages. None uses the "
            "first of completion and response that the data has."
        ),
    )
    teacher_column: str | None = ruled(
        needs="teachers, because its values name them",
        default=None,
        description=(
            "Column that names the teacher of each row, a key of teachers. None means that there is one teacher."
        ),
    )
    system_prompt: str | None = Field(
        default=None, description="System message to put before each prompt. None adds no message."
    )
    max_prompt_length: PositiveInt = Field(
        default=1024, description="Maximum number of tokens in a prompt. Longer prompts are dropped and counted."
    )
    max_length: Annotated[int, Field(gt=1, le=MAX_COUNT)] = Field(
        default=2048,
        description="Used by sft. Maximum number of tokens in a row. Longer rows are dropped and counted.",
    )
    epochs: PositiveFloat | None = free(
        default=None, description="Used by sft. Number of passes over the training rows, in place of steps."
    )
    shuffle: bool = Field(default=True, description="Shuffle the training prompts in every epoch.")
    replay_fraction: Annotated[float, Field(ge=0, le=1)] = ruled(
        needs="rewards.refresh_command; leave it out",
        default=0.1,
        description="Share of samples from earlier iterations in the data for rewards.refresh_command.",
    )
    pass_rates: FilePath | None = ruled(
        needs="data.min_pass_rate or data.max_pass_rate; set the former to 0.01, the latter to 0.99, or both",
        default=None,
        description=(
            "File with pass rates of the training prompts, from `grpo-mega eval --train-set --samples N --out FILE`."
        ),
    )
    min_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = ruled(
        needs=_PASS_RATES,
        at_most="data.max_pass_rate",
        default=None,
        description="Drop training prompts with a lower pass rate. None drops none.",
    )
    max_pass_rate: Annotated[float, Field(ge=0, le=1)] | None = ruled(
        needs=_PASS_RATES, default=None, description="Drop training prompts with a higher pass rate. None drops none."
    )

    @property
    def heldout_sources(self) -> dict[str, DataSource]:
        """The held-out sets, keyed by name. The set in data.heldout has the name ""."""
        return {"": self.heldout} if self.heldout is not None else self.heldout_sets

    @field_validator("system_prompt")
    @classmethod
    def _check_system_prompt(cls, value: str | None) -> str | None:
        if surrogate := find_surrogate(value):
            raise ValueError(
                f"data.system_prompt has the lone surrogate {surrogate}, which is no character; write U+FFFD in its"
                " place"
            )
        return value

    @field_validator("train", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return value if isinstance(value, (list, tuple)) else [value]

    def _problems(self) -> Iterator[str]:
        paths = [source.path for source in self.train]
        if not paths:
            yield "data.train=[] is empty; name at least one dataset"
        for path in paths:
            if paths.count(path) > 1:
                yield f"data.train names {path!r} twice; give it once, with its total weight"
        for name in self.heldout_sets:
            if not re.fullmatch(r"[\w.-]+", name):
                yield f"data.heldout_sets has the name {name!r}; use letters, digits, '.', '_' and '-'"


STEP_SPLITTERS = {  # see rewards/api.py
    "blank-lines": r"\n[^\S\n]*\n\s*",
    "lines": r"\n",
    "step-k": r"(?im)(?=^[ \t]{0,8}(?:[#>*_-]{1,6}[ \t]{0,4}){0,3}step[ \t]{0,4}\d{1,4}\b)",
}
STEP_REGEX = "regex:"
_OPEN_R1 = ("accuracy", "format", "soft_format", "tag_count", "reasoning_steps", "len", "repetition_penalty")
ALIASES = {f"{name}_reward": name for name in _OPEN_R1} | {"length": "len", "cosine_scaled_reward": "cosine"}


class RewardFunctionConfig(Section):
    name: str = Field(
        description="Name of a built-in reward, or your own function as module.function or file.py:function."
    )
    weight: Number = Field(
        default=1.0, description="Weight of the function in the sum of rewards. 0 only logs its value."
    )
    multiplies: bool = Field(
        default=False,
        description=(
            "Multiply the weighted sum of the other functions by weight * value instead of adding to it. Step "
            "rewards are not changed."
        ),
    )
    options: dict[str, str | int | float | bool] = Field(default={}, description="Keyword arguments of the function.")
    completions: Literal["as_data", "text", "messages"] = Field(
        default="as_data",
        description=(
            "Form of the completions for functions with TRL's signature: texts or messages. as_data follows the "
            "form of the data's prompts."
        ),
    )

    @field_validator("name")
    @classmethod
    def _known_as(cls, value: str) -> str:
        return ALIASES.get(value, value)


class RewardsConfig(Section):
    functions: Annotated[tuple[RewardFunctionConfig, ...], LIST] = Field(
        default=(
            RewardFunctionConfig(name="accuracy"),
            RewardFunctionConfig(name="format", weight=0.5),
        ),
        description=(
            "Reward functions. The reward is the weighted sum of their values. The list may be empty if rollout.agent "
            "returns the rewards."
        ),
    )
    num_workers: PositiveInt = Field(
        default=2, description="Number of worker processes per engine. The embedded engine has one set per rank."
    )
    deadline_s: Seconds = Field(
        default=5.0,
        description=(
            "Kill a worker whose call takes longer than this many seconds. The sample is then scored as a timeout."
        ),
    )
    refresh_command: str | None = free(
        needs="algorithm.ref_model_sync_steps, iterations to run between",
        default=None,
        description=(
            "Shell command that continues the training of the reward model between iterations "
            "(algorithm.ref_model_sync_steps). None runs no command."
        ),
    )
    refresh_deadline_s: Seconds = free(default=14400.0, description="Maximum number of seconds of refresh_command.")
    step_splitter: str = Field(
        default="blank-lines",
        description=(
            "How a response is split into steps for rewards of steps: blank-lines, lines, step-k, or regex:PATTERN."
        ),
    )

    @field_validator("functions")
    @classmethod
    def _distinct(cls, value: tuple[RewardFunctionConfig, ...]) -> tuple[RewardFunctionConfig, ...]:
        """Raise ValueError if a function occurs twice."""
        names = [function.name for function in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rewards.functions names {name!r} twice; give it once, with its total weight")
        return value

    @field_validator("step_splitter")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            step_separator(value)
        except ValueError as error:
            raise ValueError(f"rewards.{error}") from None
        return value


def step_separator(splitter: str) -> re.Pattern[str]:
    """Return a pattern; each step ends at the end of a match. Raise ValueError for an unknown splitter."""
    pattern = splitter.removeprefix(STEP_REGEX) if splitter.startswith(STEP_REGEX) else STEP_SPLITTERS.get(splitter)
    if not pattern:
        raise ValueError(
            f"step_splitter={splitter!r} is unknown; use {', '.join(STEP_SPLITTERS)} or {STEP_REGEX}PATTERN"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"step_splitter={splitter!r} is not a regular expression ({error}); correct the pattern"
        ) from None


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
