"""The base class and the number types of all sections of the config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.fields import FieldInfo

from grpo_mega.paths import user_path

# Larger values are mistakes, and arithmetic on them overflows: a sum over all samples, a deadline in nanoseconds.
MAX_COUNT = 10**9
MAX_RANKS = 10**6
MAX_NUMBER = 1e37  # float32 ends at 3.4e38
MAX_SECONDS = 1e8
SEPARATOR = "\x1e"  # between the broken rules of a section, which no message contains

PositiveInt = Annotated[int, Field(gt=0, le=MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_COUNT)]
NumRanks = Annotated[int, Field(gt=0, le=MAX_RANKS)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]
PositiveFloat = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Seconds = Annotated[float, Field(gt=0, le=MAX_SECONDS)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


def check_named(path: Path) -> Path:
    if path == Path() or "\0" in str(path):
        raise ValueError("must be the name of a file or folder; give one")
    return path


# Text in YAML; ~ is the user's home.
FilePath = Annotated[Path, Field(strict=False), AfterValidator(check_named), AfterValidator(user_path)]
_FREE: dict[str, JsonValue] = {"free_on_resume": True}
LIST = Field(strict=False)  # a tuple that is a list in YAML


def tokens_on_rank(length: int, cp: int) -> int:
    """Return how many of `length` tokens of one sequence each of `cp` ranks holds, after padding to 2 * cp equal
    chunks.
    """
    return length if cp == 1 else 2 * -(-length // (2 * cp))


def divisors(n: int) -> list[int]:
    """Return the divisors in ascending order. The search ends at the root, because n may be huge."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def any_divisor(n: int) -> str:
    *others, last = map(str, divisors(n))
    return f"{', '.join(others)} or {last}" if others else last


def inner_section(annotation: Any) -> type[Section] | None:
    """Return the section in a type such as `tuple[TrainSource, ...]` or `DataSource | None`; None if it has none."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((section for inner in get_args(annotation) if (section := inner_section(inner))), None)


def free(**settings: Any) -> Any:
    """Return the Field of a key that a resume may change: where and how fast a run is, or how it is kept healthy.

    Any other key would make it another run, or comes from the checkpoint (Adam's constants, in the optimizer's state).
    """
    return Field(**settings, json_schema_extra=_FREE)


def is_free(field: FieldInfo) -> bool:
    return field.json_schema_extra is _FREE


def free_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the keys that a resume may change. A section stands for its keys."""
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        if is_free(field):
            yield f"{prefix}{name}"
        elif inner is not None:
            yield from free_keys(inner, f"{prefix}{name}.")


class Section(BaseModel):
    """Strict: a value must have its key's type. Only an int may replace a float. Every key has a description."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
    is_text_too: ClassVar[bool] = False  # True if text may replace the section, such as a data set's path

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := dict.fromkeys(self._problems()):
            raise ValueError(SEPARATOR.join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        """Yield the rules that the section's values break together, each with its remedy."""
        yield from ()

    def _unmet(self, name: str, *rules: tuple[str, object, str]) -> Iterator[str]:
        """Yield a line for each key that is not at its default although its condition is false.

        A rule is the key below section `name`, its condition, and the end of the line: what the key needs, and the
        remedy.
        """
        for key, condition, text in rules:
            *parents, last = key.split(".")
            section = reduce(getattr, parents, self)
            value = getattr(section, last)
            if not condition and value != type(section).model_fields[last].default:
                yield f"{name}{key}={'true' if value is True else value}{text}"
