"""The section `rewards` of the config: the functions that score a response, with their weights and options.

preflight/ checks names and options of functions, and imports the user's own functions in a child process.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from grpo_mega.config.base import LIST, Number, PositiveInt, Seconds, Section

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
    refresh_command: str | None = Field(
        default=None,
        description=(
            "Shell command that continues the training of the reward model between iterations "
            "(algorithm.ref_model_sync_steps). None runs no command."
        ),
    )
    refresh_deadline_s: Seconds = Field(default=14400.0, description="Maximum number of seconds of refresh_command.")
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
