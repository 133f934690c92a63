"""The base class and the number types of all sections of the config."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
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
# Each rule of a key about another: how a message tells that it is broken, and whether two values break it.
RULES: dict[str, tuple[str, Callable[[Any, Any], object] | None]] = {
    "needs": ("needs", None),
    "excludes": ("conflicts with", None),
    "used_with": ("does nothing without", None),
    "divides": ("does not divide", lambda value, other: other % value),
    "at_most": ("is above", operator.gt),
    "below": ("is not below", operator.ge),
}
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


def ruled(*, is_free: bool = False, **settings: Any) -> Any:
    """Return the Field of a key with rules, by kind (RULES): each is a text, or several.

    A rule is "CONDITION[, REASON][; REMEDY]". Its condition is another key. With `needs`, `excludes` and `used_with`,
    which apply if the key is set, it is a choice joined by " or " from KEY (it is set: not at its default),
    KEY>DEFAULT, KEY=VALUE|VALUE, KEY!=VALUE|VALUE, and facts in words, such as "a model with experts". A section's
    rules apply to its keys.
    """
    rules = {kind: settings.pop(kind) for kind in RULES if kind in settings}
    return Field(**settings, json_schema_extra={"is_free": is_free, "rules": rules})


def free(**settings: Any) -> Any:
    """Return the Field of a key that a resume may change: where and how fast a run is, or how it is kept healthy.

    Any other key would make it another run, or comes from the checkpoint (Adam's constants, in the optimizer's state).
    """
    return ruled(**settings, is_free=True)


def is_free(field: FieldInfo) -> bool:
    return isinstance(extra := field.json_schema_extra, dict) and bool(extra["is_free"])


def rules_of(field: FieldInfo) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each rule of a key."""
    extra: Any = field.json_schema_extra or {"rules": {}}
    for kind, texts in extra["rules"].items():
        for text in (texts,) if isinstance(texts, str) else texts:
            yield kind, text


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
    is_text_too: ClassVar[bool] = False  # True if text may replace the section, such as a dataset's path

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := dict.fromkeys(self._problems()):
            raise ValueError(SEPARATOR.join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        """Yield the rules that the section's values break together, each with its remedy."""
        yield from ()


def broken_rules(
    config: Section, facts: Mapping[str, object] | None = None, model: str = "", *, only_unused: bool = False
) -> Iterator[str]:
    """Yield a line per rule of a key that the config breaks, or with `only_unused` per key that nothing reads.

    With `facts` about a `model`, yield only the rules that name such facts, otherwise the rules that name none.
    """
    keys, facts = {name: found for name, *found in walk(config)}, facts or {}
    for name, (value, is_set, rules) in keys.items():
        for kind, text in rules:
            rule, _, remedy = text.partition("; ")
            condition, comma, reason = rule.partition(", ")
            terms, verb = condition.split(" or "), RULES[kind][0]
            words = {term for term in terms if " " in term}
            if words - facts.keys() or bool(words) != bool(facts) or only_unused != (kind == "used_with"):
                continue
            met = [term for term in terms if (facts[term] if term in words else _holds(keys, kind, value, term))]
            lacks = kind in ("needs", "used_with")
            if bool(met) == lacks or (not is_set and (lacks or kind == "excludes")):
                continue
            leaf = name.rpartition(".")[2]
            if lacks:
                what = condition.replace("|", " or ").replace(">", " > ") + (f", not {model}" if model else "")
                otherwise = f"leave {leaf} out" if words else f"set it, or leave {leaf} out"
            else:
                what = " and ".join(
                    f"{term} of {model}".removesuffix(" of ") if term in words else _setting(keys, term) for term in met
                )
                otherwise = f"leave {leaf} out" if kind == "excludes" else "lower it"
            if kind == "divides":
                otherwise = f"use {any_divisor(keys[condition][0])}"
            yield f"{name}={shown(value)} {verb} {what}{comma}{reason}; {remedy or otherwise}"


def settings_of(config: Section) -> set[str]:
    """Return each key with its value, as lines of broken rules start."""
    return {f"{name}={shown(value)}" for name, value, *_ in walk(config)}


def shown(value: Any) -> str:
    """Return a value as in YAML, or the names in a mapping. A section has no text."""
    if isinstance(value, (Section, Mapping)):
        return "" if isinstance(value, Section) else ", ".join(value)
    return (
        str(value).lower()
        if isinstance(value, bool)
        else "null"
        if value is None
        else str(list(value) if isinstance(value, tuple) else value)
    )


def walk(
    section: Section, prefix: str = "", outer: tuple[tuple[str, str], ...] = ()
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield each key with its value, whether it is set, and its rules. A section comes before its keys."""
    for name, field in type(section).model_fields.items():
        value, rules = getattr(section, name), (*outer, *rules_of(field))
        is_section, is_set = (
            isinstance(value, Section),
            value != field.default and (value, field.default) != (False, None),
        )
        yield f"{prefix}{name}", value, is_set, () if is_section else rules
        if is_section:
            yield from walk(value, f"{prefix}{name}.", rules)


def _holds(keys: Mapping[str, Any], kind: str, value: Any, term: str) -> object:
    """Return True if a condition on a key is true, or if the key's value and `value` break a comparison."""
    name, _, wanted = term.partition("=")
    other, is_set, _ = keys[name.partition(">")[0].rstrip("!")]
    if breaks := RULES[kind][1]:
        return None not in (value, other) and breaks(value, other)
    return (shown(other) in wanted.split("|")) != name.endswith("!") if wanted else is_set


def _setting(keys: Mapping[str, Any], term: str) -> str:
    name = term.partition("=")[0].partition(">")[0]
    return f"{name}={shown(keys[name][0])}".rstrip("=")
