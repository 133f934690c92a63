"""Read a config from YAML with `--set a.b=c` on top. An error is one line with the key, its value and the remedy."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from grpo_mega.config.run import Config
from grpo_mega.errors import ConfigError


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Read `path` (YAML), apply `overrides` ("a.b=c", c in YAML) in order, and validate. Raises ConfigError."""
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}; name an existing YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path} is not YAML ({' '.join(str(error).split())}); correct the file") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config {path} holds {type(raw).__name__}, not a mapping of keys; see examples/*.yaml")
    for override in overrides or []:
        apply_override(raw, override)
    return validate(raw)


def validate(raw: dict[str, Any]) -> Config:
    """Return a Config from a nested dict. Raises ConfigError for the first problem."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from None


def dump(config: Config) -> str:
    """Return the whole config as YAML, defaults included; `load` of it gives the same Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one value of a nested dict, by "a.b=c" with c in YAML. Raises ConfigError."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} is not of the form key.subkey=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {override!r}: {text!r} is not a YAML value") from None
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        if not isinstance(node.setdefault(parent, {}), dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
        node = node[parent]
    node[leaf] = value


def _one_line(error: ValidationError) -> str:
    """Return the first problem."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}; {_nearest(problem['loc'])}"
    if problem["type"] == "missing":
        return f"{key} is missing; it has no default"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return message
    return f"{key}={problem['input']!r}: {message[0].lower()}{message[1:]}"


def _nearest(location: tuple[int | str, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        if isinstance(part, str) and part in section.model_fields:  # else an index, or a name that the user chose
            section = _section_type(section.model_fields[part].annotation)
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(names)}"


def _section_type(annotation: Any) -> Any:
    """Return the section inside an annotation such as `tuple[RewardFunctionConfig, ...]`."""
    inner = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)]
    return inner[0] if inner else annotation
