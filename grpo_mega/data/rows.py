"""Read dataset rows, and turn them into messages and gold answers. `read_rows(path)` accepts

- a file: .jsonl (one object per line), .json (a list of objects) or .parquet;
- a folder of such files, or a folder saved by `datasets`: "folder" or "folder@split" (JSON is read as from a file);
- a dataset on the Hugging Face hub, downloaded once into its cache: "hub:owner/name[:config][@split]".

The default split is "train". The index of a row is its place in the set from 0 (in JSONL its line, counting blank
lines), so it stays the same when rows are dropped later. Raises ConfigError with the place and the remedy if a set
cannot be read.

A prompt is a text, used as a user message, or a list of messages. An answer is a text or a finite number. A bad row, or
a row with a lone surrogate in these columns, raises ConfigError with its place and the remedy. No row is skipped
silently. A run checks all rows before it starts, because this needs no tokenizer.

The content of a message is a text, or a list of text parts, {"type": "text", "text": ...}, which are joined. The
content may be null in an assistant message with tool calls. The column `tools` may have the schemas of a row's tools,
which the chat template writes into the prompt. A column name may lead into nested values: "reward_model.ground_truth".

A reader of tables gives each column one type, so an answer that it may have changed is an error: a date, or a float of
2**53 or more.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from itertools import chain
from numbers import Real
from pathlib import Path
from typing import Any

from grpo_mega import http_client
from grpo_mega.config.data import DataConfig, DataSource
from grpo_mega.data.files import READERS, DataRow, numbered_rows, one_line, read_json_file
from grpo_mega.data.messages import (
    Message,
    MessageError,
    parse_text,
    read_message,
    read_tools,
    short,
    without_nulls,
)
from grpo_mega.errors import ConfigError
from grpo_mega.text import find_surrogate

DEFAULT_SPLIT = "train"
_HUB = re.compile(r"hub:(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:@]+))?(?:@(?P<split>.+))?")
# Columns to try in this order if prompt_column or answer_column is not set. The last one is verl's.
PROMPT_COLUMNS = ("prompt", "problem", "question")
ANSWER_COLUMNS = ("answer", "solution", "reward_model.ground_truth")
MESSAGES_COLUMN, COMPLETION_COLUMNS = "messages", ("completion", "response")  # columns to try for sft
TOOLS_COLUMN = "tools"
# Spellings of missing or infinite numbers by Python, pandas, JSON and other languages, in columns turned into text.
_NOT_FINITE = re.compile("nan|NaN|NAN|[-+]?(?:inf|Inf|INF|Infinity)")


@dataclass(frozen=True)
class Conversation:
    index: int  # index of the row
    place: str  # file and line, for errors
    messages: list[Message]
    answer: str
    extras: dict[str, Any]  # other columns of the row
    raw_columns: dict[str, Any]  # see types.Prompt
    digest: bytes  # digest of the prompt without data.system_prompt
    num_given: int = 0  # sft trains the assistant's messages after so many messages
    tools: Sequence[dict[str, Any]] = ()  # schemas in OpenAI's form


def read_conversations(source: DataSource, config: DataConfig) -> list[Conversation]:
    """Return a dataset's conversations, in order. Raises ConfigError for the first bad row."""
    rows = list(read_rows(source.path))
    if not rows:
        raise ConfigError(f"dataset {source.path} is empty; it needs one row per prompt")
    prompt_column, answer_column = find_columns(
        rows[0], source.prompt_column or config.prompt_column, source.answer_column or config.answer_column
    )
    conversations = []
    for row in rows:
        messages = messages_of(row, prompt_column, config.system_prompt)
        answer = answer_of(row, answer_column)
        extras = {column: value for column, value in row.values.items() if column not in (prompt_column, answer_column)}
        raw_columns = {column: find_value(row.values, column) for column in (prompt_column, answer_column)}
        is_text = isinstance(raw_columns[prompt_column], str) and config.system_prompt is None
        raw_columns["prompts"] = raw_columns[prompt_column] if is_text else messages
        digest = prompt_digest(messages, config)
        named = parse_text(row.values.get(TOOLS_COLUMN))  # a list of names is for the agent or the reward
        has_schemas = isinstance(named, list) and any(isinstance(parse_text(one), dict) for one in named)
        tools = tools_of(row) if has_schemas else ()
        conversations.append(
            Conversation(row.index, row.place, messages, answer, extras, raw_columns, digest, tools=tools)
        )
    return conversations


def read_demonstrations(source: DataSource, config: DataConfig) -> list[Conversation]:
    """Return a dataset's chats for sft, in order. Raises ConfigError for the first row that trains nothing."""
    rows = list(read_rows(source.path))
    if not rows:
        raise ConfigError(f"dataset {source.path} is empty; it needs one row per chat")
    chats, completions, prompts = config.messages_column, config.completion_column or "", ""
    if chats is None and not completions and MESSAGES_COLUMN in rows[0].values:
        chats = MESSAGES_COLUMN
    if chats is None:
        given = source.prompt_column or config.prompt_column
        prompts = given or _guess_column(rows[0], "prompt_column", PROMPT_COLUMNS)
        completions = completions or _guess_column(rows[0], "completion_column", COMPLETION_COLUMNS)
    conversations = []
    for row in rows:
        if chats:
            messages, num_given = chat_of(row, chats, config.system_prompt, "messages_column"), 0
        else:
            messages = messages_of(row, prompts, config.system_prompt)
            num_given = len(messages)
            messages += chat_of(row, completions, None, "completion_column", role="assistant")
        trained = [(i, m) for i, m in enumerate(messages) if i >= num_given and m["role"] == "assistant"]
        if not trained:
            raise ConfigError(f"{row.place}: has no assistant message to train on; correct or remove the row")
        for number, message in trained:
            if not message["content"].strip() and not message.get("tool_calls"):
                raise ConfigError(
                    f"{row.place}: message {number} is an empty assistant message, so only the end of a turn would be"
                    " trained; correct or remove the row"
                )
        digest = prompt_digest(messages[: trained[-1][0]], config)
        conversations.append(Conversation(row.index, row.place, messages, "", {}, {}, digest, num_given, tools_of(row)))
    return conversations


def read_rows(path: str) -> Iterator[DataRow]:
    """Yield dataset rows, in order."""
    if path.startswith("hub:"):
        return _read_hub(path)
    folder, split = _split_of(path)
    if folder.is_dir():
        return _read_folder(path, folder, split)
    if not folder.exists():
        raise ConfigError(f"dataset {path} does not exist; name a file, a folder or hub:owner/name")
    if not folder.is_file():
        raise ConfigError(f"dataset {path} is not a regular file; name a file, a folder or hub:owner/name")
    reader = READERS.get(Path(path).suffix)
    if reader is None:
        raise ConfigError(
            f"data file {path} has suffix {Path(path).suffix!r}; the formats are {', '.join(READERS)}, or folders of"
            " them"
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


def is_same(one: str, other: str) -> bool:
    """Return True if two paths name the same dataset."""
    if "hub:" in (one[:4], other[:4]):
        return one == other
    return _split_of(one)[1] == _split_of(other)[1] and _split_of(one)[0].resolve() == _split_of(other)[0].resolve()


def prompt_digest(messages: Sequence[Message], config: DataConfig) -> bytes:
    """Return a digest of a row's messages without data.system_prompt. Keys without a value do not count."""
    text = json.dumps(messages[config.system_prompt is not None :], default=str)
    values = json.loads(text, object_hook=lambda pairs: {k: v for k, v in pairs.items() if v is not None})
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


def find_columns(first: DataRow, prompt_column: str | None, answer_column: str | None) -> tuple[str, str]:
    """Return the columns of prompts and gold answers. If one is not given, guess it from the first row of the set.

    Raises ConfigError with the columns of the row if it has none of the usual names.
    """
    return (
        prompt_column or _guess_column(first, "prompt_column", PROMPT_COLUMNS),
        answer_column or _guess_column(first, "answer_column", ANSWER_COLUMNS),
    )


def _guess_column(first: DataRow, key: str, usual: Sequence[str]) -> str:
    for column in usual:
        with suppress(MissingColumn):
            find_value(first.values, column)
            return column
    raise ConfigError(
        f"{first.place}: {key} is not set, and none of {', '.join(usual)} is among the columns"
        f" {_names(first.values)}; set data.{key} to one of them"
    )


def messages_of(row: DataRow, column: str, system_prompt: str | None) -> list[Message]:
    """Return the conversation that the model must continue."""
    messages = chat_of(row, column, system_prompt)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{row.place}: {column} ends with an assistant message; end it with the message that the model must answer"
        )
    return messages


def chat_of(
    row: DataRow, column: str, system_prompt: str | None, key: str = "prompt_column", *, role: str = "user"
) -> list[Message]:
    """Return the messages of a column. A text is a message of `role`. `key` of the config names the column."""
    value = _value(row, column, key)
    if isinstance(value, str) and value:
        messages = [{"role": role, "content": value}]
    elif isinstance(value, list) and value:
        messages = [_message(row, f"{column}[{number}]", message) for number, message in enumerate(value)]
    else:
        raise ConfigError(
            f"{row.place}: {column}={short(value)} is neither a text nor a list of messages with role and content; "
            "correct or remove the row"
        )
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError(
            f"{row.place}: {column} starts with a system message and data.system_prompt is set too; leave one of"
            " them out"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def answer_of(row: DataRow, column: str) -> str:
    """Return the gold answer as text."""
    value = _value(row, column, "answer_column")
    if isinstance(value, date) or (row.is_columnar and isinstance(value, float) and 2**53 <= abs(value) < math.inf):
        raise ConfigError(
            f"{row.place}: {column}={short(value)} may not be what was written, because a table has one type per"
            " column: texts become dates, and long integers floats; store answers as text, or name a .jsonl file or a"
            " folder of such files"
        )
    if isinstance(value, Real | Decimal) and not isinstance(value, bool):
        if not (value.is_finite() if isinstance(value, Decimal) else -math.inf < value < math.inf):  # type: ignore[operator]
            raise ConfigError(
                f"{row.place}: {column}={value} is not finite, so every response would be wrong; correct or remove"
                " the row"
            )
        return str(value)
    if isinstance(value, str) and _NOT_FINITE.fullmatch(value.strip()):
        raise ConfigError(
            f"{row.place}: {column}={value!r} is a number that is not finite, written as text; correct or remove the"
            " row, or write \\infty for an infinite answer"
        )
    if isinstance(value, str) and value.strip():
        return value
    raise ConfigError(
        f"{row.place}: {column}={short(value)} is not an answer; write a text or a number, or remove the row"
    )


def _message(row: DataRow, key: str, message: Any) -> Message:
    """Return a message in the one form of data/messages.py. Its arguments are JSON objects."""
    try:
        found = read_message(without_nulls(message) if row.is_columnar else message)
    except MessageError as error:
        raise ConfigError(f"{row.place}: {key}{error}; correct or remove the row") from None
    for number, call in enumerate(found.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, dict) or not _is_json(arguments):
            raise ConfigError(
                f"{row.place}: {key}.tool_calls[{number}].function.arguments={short(arguments)} is not a JSON object;"
                " correct or remove the row"
            )
    return found


def _is_json(value: Any) -> bool:
    """Return whether a value can be written as JSON in UTF-8: no date, NaN or lone surrogate is in it."""
    try:
        return bool(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (TypeError, ValueError, RecursionError):
        return False


def tools_of(row: DataRow) -> list[dict[str, Any]]:
    """Return the tool schemas in the row's column `tools`."""
    value = row.values.get(TOOLS_COLUMN)
    try:
        return read_tools(value, ()) if row.is_columnar else read_tools(value)
    except MessageError as error:
        raise ConfigError(f"{row.place}: {TOOLS_COLUMN}{error}; correct the row, or rename the column") from None


def _value(row: DataRow, column: str, key: str) -> Any:
    """Return the value of a column. A lone surrogate is an error, because a replacement would change the text."""
    try:
        value = find_value(row.values, column)
    except MissingColumn as error:
        raise ConfigError(f"{row.place}: {key}={column!r} is not a column of this row; {error}") from None
    if surrogate := find_surrogate(value):
        raise ConfigError(
            f"{row.place}: {column} has the lone surrogate {surrogate}, which is not a character; write the character"
            " that was meant, or U+FFFD"
        )
    return value


def _names(values: dict[str, Any]) -> str:
    return ", ".join(map(str, values)) or "none"


def _split_of(path: str) -> tuple[Path, str]:
    """Return the path and split of a folder. An @ in the folder's name stays part of the name."""
    folder, separator, split = path.rpartition("@")
    if separator and split and not Path(path).exists() and Path(folder).is_dir():
        return Path(folder), split
    return Path(path), DEFAULT_SPLIT


def _read_folder(path: str, folder: Path, split: str) -> Iterator[DataRow]:
    """Read JSON as from its files. Stream other rows, so that `datasets` leaves no copy in its cache."""
    import datasets

    try:
        if (folder / "dataset_dict.json").exists():
            rows = datasets.load_from_disk(str(folder))[split]
        elif (folder / "state.json").exists():
            rows = datasets.load_from_disk(str(folder))
        else:
            builder = datasets.load_dataset_builder(str(folder))
            files = [Path(file) for file in (builder.config.data_files or {}).get(split, ())]
            opened = [read_json_file(file) for file in files] if builder.name == "json" else []
            if opened and (of_json := [rows for rows in opened if rows is not None]) and len(of_json) == len(files):
                for index, row in enumerate(chain.from_iterable(of_json)):
                    yield DataRow(index, f"{path}, row {index} ({Path(row.place).name})", row.values)
                return
            rows = datasets.load_dataset(str(folder), split=split, streaming=True)
        yield from numbered_rows(path, iter(rows))
    except ConfigError:
        raise
    except Exception as error:  # datasets passes on the errors of its readers
        remedy = "put .parquet, .jsonl or .json files there, or name a split of it as folder@split"
        raise ConfigError(f"data folder {path} cannot be read ({one_line(error)}); {remedy}") from None


def _read_hub(path: str) -> Iterator[DataRow]:
    match = _HUB.fullmatch(path)
    if match is None:
        raise ConfigError(f"dataset {path!r} does not have the form hub:owner/name[:config][@split]")
    is_offline = http_client.use_cache_if_unreachable()
    import datasets

    try:
        rows = datasets.load_dataset(match["name"], match["config"], split=match["split"] or DEFAULT_SPLIT)
    except Exception as error:  # datasets passes on the errors of its loaders and of the network
        remedy = "check name, config, split and network, or download it and name the folder"
        why = f"{http_client.endpoint()} is not reachable, and the cache lacks it" if is_offline else one_line(error)
        raise ConfigError(f"dataset {path} cannot be loaded ({why}); {remedy}") from None
    yield from numbered_rows(path, iter(rows))
