"""The schema of a run's config: sections of pydantic models, read from YAML with `--set a.b=c` on top. Never imports
torch.

run.py holds the whole config and the smaller sections. The other modules are named after their sections. A rule
about another key, the model's kind or a package is at the key's field (base.ruled). Other rules that need more than the
config itself are in cli/checks/.

Values must have the types of the schema: `yes` is no number and no boolean, and text stays as written. An error is one
line with the key, its value and the fix.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from grpo_mega.config.algorithm import AlgorithmConfig
from grpo_mega.config.base import SEPARATOR, Section, inner_section
from grpo_mega.config.data import DataConfig, RewardsConfig
from grpo_mega.config.model import (
    GuardConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RouterConfig,
    TeacherConfig,
)
from grpo_mega.config.rollout import RolloutConfig, SyncConfig
from grpo_mega.config.run import (
    BatchConfig,
    CheckpointConfig,
    Config,
    EvalConfig,
    LayoutConfig,
    LogConfig,
)
from grpo_mega.errors import ConfigError
from grpo_mega.paths import CONFIG_FILE, read_file, user_path
from grpo_mega.yaml_text import dump_yaml, parse_value, parse_yaml

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "GuardConfig",
    "LayoutConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RouterConfig",
    "SyncConfig",
    "TeacherConfig",
    "apply_override",
    "changed",
    "dump",
    "leaves",
    "load",
    "nested",
    "problems_of",
    "read",
    "validate",
]

INCLUDE = "include"  # key of a file that this file extends
MAX_BYTES = 4 << 20  # the largest config file that is read
_MAX_SHOWN = 200
_UNION_LABELS = ("bool", "literal['reference']")  # pydantic adds these labels for a key with several types
_RENAMED = {"sync.prove": "sync.verify"}  # old names of keys
_REMEDIES = {  # by pydantic's error type; {gt}, {expected}, ... are its values, {form} is the result of _form
    "bool_type": "must be true or false; write one of them",
    "int_type": "must be a whole number; write it in digits, like 16",
    "float_type": "must be a number; write it like 0.5 or 1e-6",
    "string_type": "must be text; put it in quotes",
    "path_type": "must be the name of a file or folder; put it in quotes",
    "tuple_type": "must be a list; write it like [{form}]",
    "model_type": "must be a section of keys; write it like {form}",
    "dict_type": "must be a section of keys; write it like {form}",
    "finite_number": "must be a finite number; write it like 0.5 or 1e-6",
    "greater_than": "must be above {gt}; raise it",
    "greater_than_equal": "must be at least {ge}; raise it",
    "less_than": "must be below {lt}; lower it",
    "less_than_equal": "must be at most {le}; lower it",
    "string_too_short": "must not be empty; give a text",
    "literal_error": "must be {expected}; {nearest}",
}


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """Read and validate the config of `read`. Raise ConfigError."""
    return validate(read(path, overrides or []))


def read(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Read `path` (YAML), put its keys over those of the file it includes, and apply `overrides` ("a.b=c") in order.

    code_dir is the folder of `path`, unless a file or an override has the key. Raise ConfigError.
    """
    raw = _read_keys(path)
    if INCLUDE in raw:
        raw = _merged(_included(path, raw.pop(INCLUDE)), raw)
    raw.setdefault("code_dir", str(path.absolute().parent))
    for override in overrides:
        apply_override(raw, override)
    return raw


def _included(path: Path, name: object) -> dict[str, Any]:
    """Return the keys of the file that `path` includes by a name relative to its folder."""
    if not isinstance(name, str):
        raise ConfigError(f"config {path}: include={name!r} must be the name of a YAML file; write it like base.yaml")
    other = path.parent / user_path(Path(name))
    raw = _read_keys(other)
    if INCLUDE in raw:
        raise ConfigError(f"config {other}: is included by {path}, so it must not include a third; merge two of them")
    return raw


def _merged(base: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of both. A section keeps the keys of `base` that `raw` does not have; a list is replaced."""
    merged = dict(base)
    for key, value in raw.items():
        both = isinstance(base.get(key), dict) and isinstance(value, dict)
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _read_keys(path: Path) -> dict[str, Any]:
    if path.is_dir():
        remedy = "name a YAML file"
        if (path / CONFIG_FILE).is_file():
            remedy = f"name the config in it, {path / CONFIG_FILE}"
        elif (path / "config.json").is_file():
            remedy = f"it is a model, so write a config for it by `grpo-mega init {path} DATA`, and name that"
        raise ConfigError(f"config {path}: is a folder; {remedy}")
    try:
        raw = parse_yaml(read_file(path, MAX_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}; name an existing YAML file") from None
    except ValueError as error:
        raise ConfigError(f"config {path}: {error}; correct the file") from None
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else type(raw).__name__
        raise ConfigError(f"config {path} holds {found}, not a mapping of keys; see examples/*.yaml")
    return raw


def validate(raw: dict[str, Any]) -> Config:
    """Return a Config from a nested dict. Raise ConfigError for all problems. Rules between keys come last."""
    return Config.model_validate(raw)


def dump(config: Config) -> str:
    """Return the whole config as YAML, defaults included. `load` of the text returns the same Config."""
    return dump_yaml(config.model_dump(mode="json"))


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Return the nested dict of values by dotted key."""
    raw: dict[str, Any] = {}
    for key, value in keys.items():
        *parents, leaf = key.split(".")
        section = raw
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return raw


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dict by dotted key. An empty section is a value."""
    if not (isinstance(value, dict) and value):
        return {prefix: value}
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= leaves(item, f"{prefix}.{name}" if prefix else str(name))
    return found


def changed(config: Config) -> dict[str, Any]:
    """Return the values that differ from the defaults, by dotted key."""
    return leaves(config.model_dump(mode="json", exclude_defaults=True))


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one value of a nested dict, by "a.b=c". Raise ConfigError.

    If the schema expects text, c is taken literally, except that null is None if the key allows None. Otherwise c is a
    number, true, false, null, or a list or section in YAML's flow style.
    """
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {override!r} is not of the form key.subkey=value")
    *parents, leaf = key.split(".")
    node = raw
    for parent in parents:
        if not isinstance(node.setdefault(parent, {}), dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
        node = node[parent]
    forms = _forms(Config, key.split("."))
    is_flow = text.lstrip()[:1] in ("[", "{") and any(form in (tuple, dict) or _is_section(form) for form in forms)
    is_null, is_text = NoneType in forms and text.strip() == "null", str in forms and not forms & {bool, int, float}
    try:
        node[leaf] = None if is_null else text if is_text and not is_flow else parse_value(text)
    except ValueError as error:
        raise ConfigError(f"--set {override!r}: {text!r} is not a YAML value ({error}); correct it") from None


def _forms(annotation: Any, path: list[str]) -> set[Any]:
    """Return the types that the schema allows at a path: str, int, tuple, a section, ...; empty for an unknown key."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _forms(inner[0], path)
    if origin in (Union, UnionType):
        return set().union(*(_forms(one, path) for one in inner))
    if origin is Literal:
        return set() if path else {type(value) for value in inner}
    if origin is tuple:
        return set() if path else {tuple} | (_forms(inner[0], []) & {str})
    if origin is dict:
        return _forms(inner[1], path[1:]) if path else {dict}
    if _is_section(annotation):
        if path:
            field = annotation.model_fields.get(path[0])
            return _forms(field.annotation, path[1:]) if field else set()
        return {annotation, str} if annotation.is_text_too else {annotation}
    return set() if path else {str if annotation is Path else annotation}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def problems_of(schema: type[BaseModel], error: ValidationError) -> list[str]:
    """Return what `schema` finds wrong in its values: one line per broken rule, and the first line of each key."""
    lines: dict[str, list[str]] = {}
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if part not in _UNION_LABELS)
        lines.setdefault(key, _lines_of(schema, key, problem))
    return [line for of_key in lines.values() for line in of_key]


def _lines_of(schema: type[BaseModel], key: str, problem: ErrorDetails) -> list[str]:
    if key in _RENAMED:
        return [f"{key} is called {_RENAMED[key]} now; rename the key"]
    if problem["type"] == "extra_forbidden":
        section, leaf = _section_at(schema, problem["loc"][:-1]), str(problem["loc"][-1])
        assert section is not None
        names = list(section.model_fields)
        others = {name: inner_section(field.annotation) for name, field in schema.model_fields.items()}
        homes = [f"{name}.{leaf}" for name, other in others.items() if other is not None and leaf in other.model_fields]
        close = difflib.get_close_matches(leaf, names, n=1, cutoff=0.8)
        close = close or homes or difflib.get_close_matches(leaf, names, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known keys here: {', '.join(names)}"
        return [f"unknown key {key!r}; {hint}"]
    if problem["type"] == "missing":
        return [f"{key} is missing; it has no default"]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error" and not message.startswith("must "):
        return message.split(SEPARATOR)  # the messages already name the key
    if problem["type"] in _REMEDIES:
        values = {name: f"{v:g}" if isinstance(v, float) else str(v) for name, v in problem.get("ctx", {}).items()}
        known = re.findall("'([^']*)'", values.get("expected", ""))
        close = difflib.get_close_matches(str(problem["input"]), known, n=1)
        nearest = f"did you mean {close[0]!r}?" if close else "use one of them"
        message = _REMEDIES[problem["type"]].format_map(values | {"nearest": nearest, "form": _form(schema, problem)})
    try:
        shown = repr(problem["input"])
    except ValueError:  # an int with too many digits to print
        shown = "a huge number"
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    return [f"{key}={shown}: {message[0].lower()}{message[1:]}"]


def _form(schema: type[BaseModel], problem: ErrorDetails) -> str:
    """Return the form of a section, or of a list's item. The given value is its first key that has no default."""
    given = problem["input"]
    value = str(given) if isinstance(given, str | int | float) else "VALUE"
    section = _section_at(schema, problem["loc"])
    if section is None or problem["type"] == "dict_type":
        return value if problem["type"] == "tuple_type" else f"{{NAME: {value}}}"
    required = (name for name, field in section.model_fields.items() if field.is_required())
    return f"{{{next(required, next(iter(section.model_fields)))}: {value}}}"


def _section_at(schema: type[BaseModel], location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Return the section at a place of the schema, or the section of a list's items; None if there is none."""
    section: type[BaseModel] | None = schema
    for part in location:
        # Other parts are an index, or a name that the user chose.
        if section is not None and isinstance(part, str) and part in section.model_fields:
            section = inner_section(section.model_fields[part].annotation)
    return section
