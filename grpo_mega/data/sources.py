"""Read the rows of a data set. `read_rows(path)` accepts

- a file: .jsonl (one object per line), .json (a list of objects) or .parquet;
- a folder of such files, or a folder saved by `datasets`: "folder" or "folder@split";
- a data set on the Hugging Face hub, downloaded once into its cache: "hub:owner/name[:config][@split]".

The default split is "train". The index of a row is its place in the set from 0 (in JSONL its line, counting blank lines), so it
stays the same when rows are dropped later. Raises ConfigError with the place and the remedy if a set cannot be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.files import parse_json

DEFAULT_SPLIT = "train"
_HUB = re.compile(r"hub:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:@]+))?(?:@(?P<split>.+))?")


@dataclass(frozen=True)
class Row:
    index: int
    place: str  # place for errors: "file:line" or "path, row 7"
    values: dict[str, Any]


def read_rows(path: str) -> Iterator[Row]:
    """Yield the rows of a data set, in order."""
    if path.startswith("hub:"):
        return _read_hub(path)
    folder, split = _split_of(path)
    if folder.is_dir():
        return _read_folder(path, folder, split)
    if not folder.exists():
        raise ConfigError(f"data set {path} does not exist; name a file, a folder or hub:owner/name")
    if not folder.is_file():
        raise ConfigError(f"data set {path} is not a regular file; name a file, a folder or hub:owner/name")
    reader = _READERS.get(Path(path).suffix)
    if reader is None:
        raise ConfigError(
            f"data file {path} has suffix {Path(path).suffix!r}; the formats are {', '.join(_READERS)}, or folders of them"
        )
    return reader(Path(path))


class MissingColumn(Exception):
    """A row lacks a column. The text says which columns or keys it has instead."""


def find_value(values: dict[str, Any], column: str) -> Any:
    """Return the value of a column; for "a.b" also the value of key b within column a. Raises MissingColumn.

    A column or key whose name contains the dot comes first.
    """
    if column in values:
        return values[column]
    problem = f"its columns are: {_names(values)}"
    for end in (place for place, character in reversed([*enumerate(column)]) if character == "."):
        outer, inner = values.get(column[:end]), column[end + 1 :]
        if isinstance(outer, dict):
            try:
                return find_value(outer, inner)
            except MissingColumn as error:
                problem = str(error).replace("its columns are", f"the keys of {column[:end]} are", 1)
        elif column[:end] in values:
            problem = f"its {column[:end]}={outer!r:.60} has no keys"
    raise MissingColumn(problem)


def _names(values: dict[str, Any]) -> str:
    return ", ".join(map(str, values)) or "none"


def is_same(one: str, other: str) -> bool:
    """Return whether two paths name the same data set."""
    if "hub:" in (one[:4], other[:4]):
        return one == other
    return _split_of(one)[1] == _split_of(other)[1] and _split_of(one)[0].resolve() == _split_of(other)[0].resolve()


def _split_of(path: str) -> tuple[Path, str]:
    """Return the path and split of a folder. An @ in the folder's name stays part of the name."""
    folder, separator, split = path.rpartition("@")
    if separator and split and not Path(path).exists() and Path(folder).is_dir():
        return Path(folder), split
    return Path(path), DEFAULT_SPLIT


def _read_jsonl(path: Path) -> Iterator[Row]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for index, line in enumerate(lines):
                if line.strip():
                    place = f"{path}:{index + 1}"
                    yield Row(index, place, _parse(line, place))
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {path} is not UTF-8 ({error.reason}); write it as UTF-8") from None


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ConfigError(f"{place} is not JSON ({reason}); write one JSON object per line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place} holds a JSON {type(row).__name__}, not an object; write one JSON object per line")
    return row


def _read_json(path: Path) -> Iterator[Row]:
    try:
        rows = parse_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}; name a file that can be read") from None
    except ValueError as error:  # raised for text that is not JSON or not UTF-8
        hint = "name it .jsonl if it holds one object per line" if "Extra data" in str(error) else "write a list of objects"
        raise ConfigError(f"data file {path} is not JSON ({error}); {hint}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"data file {path} holds a JSON {type(rows).__name__}; write a list of objects")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, row {index} is a JSON {type(row).__name__}, not an object; write a list of objects")
        yield Row(index, f"{path}, row {index}", row)


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            values = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from _numbered(str(path), values)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"data file {path} is not a readable Parquet file ({_text(error)}); write it again") from None


def _read_folder(path: str, folder: Path, split: str) -> Iterator[Row]:
    """Stream the rows, so that `datasets` leaves no copy in its cache."""
    import datasets

    try:
        if (folder / "dataset_dict.json").exists():
            rows = datasets.load_from_disk(str(folder))[split]
        elif (folder / "state.json").exists():
            rows = datasets.load_from_disk(str(folder))
        else:
            rows = datasets.load_dataset(str(folder), split=split, streaming=True)
        yield from _numbered(path, iter(rows))
    except ConfigError:
        raise
    except Exception as error:  # datasets passes on the errors of its readers
        remedy = "put .parquet, .jsonl or .json files there, or name a split of it as folder@split"
        raise ConfigError(f"data folder {path} cannot be read ({_text(error)}); {remedy}") from None


def _read_hub(path: str) -> Iterator[Row]:
    match = _HUB.fullmatch(path)
    if match is None:
        raise ConfigError(f"data set {path!r} is not of the form hub:owner/name[:config][@split]")
    import datasets

    try:
        rows = datasets.load_dataset(match["name"], match["config"], split=match["split"] or DEFAULT_SPLIT)
    except Exception as error:  # datasets passes on the errors of its loaders and of the network
        remedy = "check name, config, split and network, or download it and name the folder"
        raise ConfigError(f"data set {path} cannot be loaded ({_text(error)}); {remedy}") from None
    yield from _numbered(path, iter(rows))


def _numbered(path: str, values: Iterator[dict[str, Any]]) -> Iterator[Row]:
    for index, row in enumerate(values):
        yield Row(index, f"{path}, row {index}", row)


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
