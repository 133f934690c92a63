"""The section `rewards` of the config: the functions that score a response, with their weights and options.

validation/ checks the names and options of functions; workers check those of the user's own functions when they import them.
"""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from grpo_mega.config.base import PositiveFloat, PositiveInt, Section

STEP_SPLITTERS = ("blank-lines", "lines", "step-k")  # see rewards/steps.py
STEP_REGEX = "regex:"


class RewardFunctionConfig(Section):
    name: str
    weight: float = 1.0
    options: dict[str, str | int | float | bool] = Field(default={})  # keyword arguments of the function


class RewardsConfig(Section):
    functions: tuple[RewardFunctionConfig, ...] = (
        RewardFunctionConfig(name="accuracy"),
        RewardFunctionConfig(name="format", weight=0.5),
    )
    num_workers: PositiveInt = 2  # worker processes per engine (embedded: per rank)
    deadline_s: PositiveFloat = 5.0  # of one call; then the worker is killed and the verdict is "timeout"
    step_splitter: str = "blank-lines"  # for functions that score steps; see rewards/steps.py

    @field_validator("functions")
    @classmethod
    def _distinct(cls, value: tuple[RewardFunctionConfig, ...]) -> tuple[RewardFunctionConfig, ...]:
        names = [f.name for f in value]
        if not names:
            raise ValueError("rewards.functions is empty; name at least one, for example accuracy")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"rewards.functions names {name!r} twice; give it once, with its total weight")
        return value

    @field_validator("step_splitter")
    @classmethod
    def _known(cls, value: str) -> str:
        pattern = value.removeprefix(STEP_REGEX) if value.startswith(STEP_REGEX) else None
        if value not in STEP_SPLITTERS and not pattern:
            raise ValueError(
                f"rewards.step_splitter={value!r} is unknown; use {', '.join(STEP_SPLITTERS)} or {STEP_REGEX}PATTERN"
            )
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(
                f"rewards.step_splitter={value!r} is not a regular expression ({error}); correct the pattern"
            ) from None
        return value
