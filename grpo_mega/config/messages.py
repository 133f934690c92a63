"""What pydantic finds wrong with a config, as one line that names the key, its value and the remedy."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError


def one_line(config: type[BaseModel], error: ValidationError) -> str:
    """The first problem found in a `config`."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_nearest(config, problem['loc'])}"
    if problem["type"] == "missing":
        return f"{key} is missing; it has no default"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    return f"{key}={problem['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(config: type[BaseModel], location: tuple[int | str, ...]) -> str:
    section: Any = config
    for part in location[:-1]:
        if isinstance(part, str) and part in section.model_fields:  # not a name that the person gave
            section = _section_type(section.model_fields[part].annotation)
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(names)}"


def _section_type(annotation: Any) -> Any:
    """The section inside an annotation such as `tuple[RewardFunctionConfig, ...]`."""
    inner = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)]
    return inner[0] if inner else annotation
