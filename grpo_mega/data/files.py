"""Read files of rows: JSON lines, a JSON list or Parquet. Errors name the place and the remedy."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.errors import ConfigError
from grpo_mega.paths import parse_json


@dataclass(frozen=True)
class DataRow:
    index: int
    place: str  # place for errors: "file:line" or "path, row 7"
    values: dict[str, Any]
    is_columnar: bool = False  # a reader that gives each column one type made the values


def read_json_file(path: Path) -> Iterator[DataRow] | None:
    """Return the rows of a file with objects in lines or in a list; None for other files. It may be a .gz file."""
    with suppress(ValueError):  # not text, or not JSON
        with _open_text(path) as file:
            first = next(filter(str.strip, file), "").lstrip()
        if first.startswith("["):
            return _read_json(path)
        if isinstance(parse_json(first), dict):
            return _read_jsonl(path)
    return None


def _read_jsonl(path: Path) -> Iterator[DataRow]:
    try:
        with _open_text(path) as lines:
            for index, line in enumerate(lines):
                place = f"{path}:{index + 1}"
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError as error:
                    text = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                    raise ConfigError(f"{place} is not JSON ({text}); write one JSON object per line") from None
                if not isinstance(row, dict):
                    problem = f"holds a JSON {type(row).__name__}, not an object"
                    raise ConfigError(f"{place} {problem}; write one JSON object per line")
                yield DataRow(index, place, row)
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}; name a file that can be read") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {path} is not UTF-8 ({error.reason}); write it as UTF-8") from None


def _read_json(path: Path) -> Iterator[DataRow]:
    try:
        with _open_text(path) as file:
            rows = parse_json(file.read())
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}; name a file that can be read") from None
    except ValueError as error:  # raised for text that is not JSON or not UTF-8
        is_jsonl = "Extra data" in str(error)
        remedy = "name it .jsonl if it holds one object per line" if is_jsonl else "write a list of objects"
        raise ConfigError(f"data file {path} is not JSON ({error}); {remedy}") from None
    if not isinstance(rows, list):
        raise ConfigError(f"data file {path} holds a JSON {type(rows).__name__}; write a list of objects")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(
                f"{path}, row {index} is a JSON {type(row).__name__}, not an object; write a list of objects"
            )
        yield DataRow(index, f"{path}, row {index}", row)


def _read_parquet(path: Path) -> Iterator[DataRow]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            values: Iterator[Any] = (row for batch in file.iter_batches() for row in batch.to_pylist())
            if b'"Json"' in (file.schema_arrow.metadata or {}).get(b"huggingface", b""):
                import datasets  # it stores values of several types as JSON text

                values = map(datasets.Features.from_arrow_schema(file.schema_arrow).decode_example, values)
            yield from numbered_rows(path, values)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"data file {path} is not a readable Parquet file ({one_line(error)}); write it again"
        ) from None


def _open_text(path: Path) -> Any:
    return (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig")


def numbered_rows(path: str | Path, values: Iterator[dict[str, Any]]) -> Iterator[DataRow]:
    for index, row in enumerate(values):
        yield DataRow(index, f"{path}, row {index}", row, is_columnar=True)


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
