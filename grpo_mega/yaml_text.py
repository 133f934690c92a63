"""YAML as every part of the project reads and writes it. A value is what a person wrote, or an error with its line.

Plain scalars follow the core schema of YAML 1.2: only true and false are booleans, `1e-6` is a number, and `1:30`,
`yes` and dates are text. Keys are always text. Duplicate keys, merge keys and unknown tags are refused. Aliases may
repeat a value, but may not turn a small file into a huge one.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_VALUES = 100_000  # per text; every use of an alias counts
_TAG = "tag:yaml.org,2002:"
_PATTERNS = {
    "null": re.compile(r"null|Null|NULL|~|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": re.compile(
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    ),
}


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document. Raise ValueError in one line, with the line of the text."""
    try:
        node = _compose(text)
        return None if node is None else _Reader().value(node, "")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_value(text: str) -> Any:
    """Return the value of a text on a command line: a list or mapping in flow style, a number, true, null, or the text
    itself.

    Raise ValueError.
    """
    stripped = text.strip()
    if stripped[:1] in ("[", "{"):
        value = parse_yaml(stripped)
        node = yaml.compose(stripped, Loader=_Loader)
        if node is None or len(stripped) != node.end_mark.index:
            raise ValueError(f"text follows {stripped[0]}...")
        return value
    kind = _kind(stripped)
    return text if kind == "str" else _scalar(kind, stripped)


def dump_yaml(value: Any) -> str:
    """Return a text that `parse_yaml` and readers of YAML 1.1 read as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def _compose(text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: U+{ord(text[error.position]):04X} is not allowed in YAML") from None
    except (yaml.YAMLError, OverflowError, ValueError) as error:  # chr() raises the last two for "\U99999999"
        raise ValueError(f"not YAML ({' '.join(str(error).split())})") from None


class _Loader(yaml.SafeLoader):
    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode and implicit[0]:
            return _TAG + _kind(value)
        return super().resolve(kind, value, implicit)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 reads as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern in _PATTERNS.items():
    _Dumper.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern.pattern})\Z"), None)


class _Reader:
    """Creates values from the nodes of one document."""

    def __init__(self) -> None:
        self._num_values = 0
        self._open: set[yaml.Node] = set()  # the collections that contain the current node

    def value(self, node: yaml.Node, key: str) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")
        if isinstance(node, yaml.ScalarNode):
            kind = node.tag.removeprefix(_TAG)
            if kind not in ("str", *_PATTERNS):
                raise ValueError(f"{_place(node, key)}: tag {node.tag!r} is unknown; leave it out")
            if kind != "str" and not _PATTERNS[kind].fullmatch(node.value):
                raise ValueError(f"{_place(node, key)}: {node.value!r} is not of its tag !!{kind}")
            try:
                return _scalar(kind, node.value)
            except ValueError as error:
                raise ValueError(f"{_place(node, key)}: {error}") from None
        kind = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != _TAG + kind:
            raise ValueError(f"{_place(node, key)}: tag {node.tag!r} is unknown; leave it out")
        if node in self._open:
            raise ValueError(f"{_place(node, key)}: the value contains itself; write it out")
        self._open.add(node)
        if not isinstance(node, yaml.MappingNode):
            items = [self.value(item, f"{key}.{i}" if key else str(i)) for i, item in enumerate(node.value)]
            self._open.remove(node)
            return items
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                raise ValueError(f"{_place(name_node, key)}: a key must be text, not a list or mapping")
            name = _scalar("str", name_node.value)
            inner = f"{key}.{name}" if key else name
            line = name_node.start_mark.line + 1
            if name == "<<" and name_node.style is None:
                raise ValueError(f"{_place(name_node, inner)}: merge keys are not read; write the keys out")
            if name in values:
                raise ValueError(f"line {line}: key {inner!r} is given twice, first in line {lines[name]}")
            lines[name] = line
            values[name] = self.value(value_node, inner)
        self._open.remove(node)
        return values


def _place(node: yaml.Node, key: str) -> str:
    return f"line {node.start_mark.line + 1}" + (f": key {key!r}" if key else "")


def _kind(text: str) -> str:
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(text)), "str")


def _scalar(kind: str, text: str) -> Any:
    """Return the value of a text that matches the pattern of its kind. Raise ValueError if a number is too long."""
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        if len(text) > 1000:
            raise ValueError(f"a number of {len(text):,} digits is too long")
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)
    if kind == "float":
        lowered = text.lower()
        return float(lowered.replace(".inf", "inf").replace(".nan", "nan"))
    # Joins escaped pairs, like JSON.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
