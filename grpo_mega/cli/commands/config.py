"""`grpo-mega config [KEY] [--markdown]`: print the keys of the config with type, default and description."""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from grpo_mega.cli.commands.options import KeyOptions
from grpo_mega.config import INCLUDE, Config
from grpo_mega.config.base import Section, inner_section, is_free, rules_of
from grpo_mega.errors import ConfigError
from grpo_mega.text import nearest

NAMES = {bool: "true | false", int: "whole number", float: "number", str: "text", Path: "path", NoneType: "null"}


@dataclass(frozen=True)
class Key:
    """One key by its dotted name. NAME stands for a name that the user chooses, and [] for any item of a list."""

    name: str
    kind: str
    default: str  # in YAML's flow style, or "required"
    description: str
    is_free: bool = False  # on resume
    rules: tuple[str, ...] = ()  # without their remedies


_INCLUDE = Key(
    INCLUDE,
    "path",
    "",
    "Another config file, relative to this one. The keys of this file go over its keys, section by section; a list "
    "replaces a list. The other file includes none. RUN_DIR/config.yaml has all keys.",
)


def run(options: KeyOptions) -> int:
    """Print a key, the keys of a section, or all keys. Raise ConfigError for an unknown key."""
    key, keys = options.key, [_INCLUDE, *find_keys(Config)]
    wanted = [] if key is None else key.replace("[]", "").split(".")

    def is_wanted(one: Key) -> bool:  # the wanted key, or a key in the wanted section
        parts = one.name.replace("[]", "").split(".")
        return len(parts) >= len(wanted) and all(p in (w, "NAME") for p, w in zip(parts, wanted, strict=False))

    chosen = list(filter(is_wanted, keys))
    if not chosen:
        remedy = nearest(str(key), [one.name for one in keys]).rstrip()
        remedy = remedy or f"use one of {', '.join(Config.model_fields)}, or a key in one"
        raise ConfigError(f"{key!r} is not a key of the config; {remedy}")
    print(markdown(chosen) if options.is_markdown else "\n\n".join(map(as_text, chosen)))
    return 0


def find_keys(section: type[Section], prefix: str = "", *, in_free: bool = False) -> Iterator[Key]:
    """Yield the keys of a section in the order of the schema, each section before its keys."""
    for name, field in section.model_fields.items():
        inner = inner_section(field.annotation)
        description = " ".join((field.description or "").split())  # a long one has several lines in the schema
        value, is_section = field.default, inner is not None and isinstance(field.default, Section)
        if isinstance(value, tuple):
            value = [one.model_dump(exclude_defaults=True) if isinstance(one, Section) else one for one in value]
        # A section has no default, because its keys have defaults.
        default = "required" if field.is_required() else "" if is_section else json.dumps(value)
        rules = tuple(f"{kind.replace('_', ' ')} {text.partition(';')[0]}" for kind, text in rules_of(field))
        yield Key(f"{prefix}{name}", _kind(field.annotation), default, description, in_free or is_free(field), rules)
        if inner is not None:
            origin = get_origin(field.annotation)
            suffix = "[]" if origin is tuple else ".NAME" if origin is dict else ""
            yield from find_keys(inner, f"{prefix}{name}{suffix}.", in_free=in_free or is_free(field))


def as_text(key: Key) -> str:
    description = "\n".join(
        textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
        for line in (key.description, *key.rules)
    )
    default = key.default if key.default == "required" else f"default {key.default}"
    notes = [default] * bool(key.default) + ["may change on resume"] * key.is_free
    return "; ".join([f"{key.name}: {key.kind}", *notes]) + f"\n{description}"


def markdown(keys: list[Key]) -> str:
    """Return the reference: one table row per key."""
    rows = [
        (f"`{k.name}`", k.kind.replace("|", "or"), f"`{k.default}`" if k.default else "", k.description) for k in keys
    ]
    cells = [("key", "value", "default", "meaning"), ("---",) * 4, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def _kind(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(_kind(one) for one in inner))
    if origin is tuple:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return f"NAME: {_kind(inner[1])}"
    return NAMES.get(annotation, "section")
