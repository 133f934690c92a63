"""The base class and the number types of all sections of the config."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


def tokens_on_rank(length: int, cp: int) -> int:
    """Return how many of `length` tokens of one sequence, padded to 2 * cp equal chunks, each of `cp` ranks holds."""
    return length if cp == 1 else 2 * -(-length // (2 * cp))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
