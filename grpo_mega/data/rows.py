"""Turn rows into messages and gold answers. Needs no tokenizer, so that all rows of a run's data are checked before it starts.

A prompt is a text, which becomes a user message, or a list of messages; an answer is a text or a number. A bad row, or one
with a lone surrogate in these columns, raises ConfigError with its place and the remedy; no row is skipped silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_mega.config.data import DataConfig, DataSource
from grpo_mega.data.sources import Row, read_rows
from grpo_mega.errors import ConfigError
from grpo_mega.text import find_surrogate

Message = dict[str, Any]
ANSWER_COLUMNS = ("answer", "solution")  # where answer_column is not given, the first of these that the set has


@dataclass(frozen=True)
class Conversation:
    index: int  # of its row
    place: str  # for errors
    messages: list[Message]
    answer: str
    extras: dict[str, Any]  # the row's other columns
    given: dict[str, Any]  # see types.Prompt


def read_conversations(source: DataSource, config: DataConfig) -> list[Conversation]:
    """Return the conversations of a data set, in its order. Raises ConfigError for the first row that makes none."""
    rows = list(read_rows(source.path))
    if not rows:
        raise ConfigError(f"data set {source.path} is empty; it needs one row per prompt")
    prompt_column = source.prompt_column or config.prompt_column
    answer_column = find_answer_column(rows[0], source.answer_column or config.answer_column)
    return [_conversation(row, prompt_column, answer_column, config.system_prompt) for row in rows]


def _conversation(row: Row, prompt_column: str, answer_column: str, system_prompt: str | None) -> Conversation:
    messages, answer = messages_of(row, prompt_column, system_prompt), answer_of(row, answer_column)
    extras = {column: value for column, value in row.values.items() if column not in (prompt_column, answer_column)}
    given = {column: row.values[column] for column in (prompt_column, answer_column)}
    given["prompts"] = given[prompt_column] if system_prompt is None else messages
    return Conversation(row.index, row.place, messages, answer, extras, given)


def find_answer_column(first: Row, given: str | None) -> str:
    """Return the answer's column, from the first row of a set: the given one, else `answer`, else `solution`."""
    if given is not None:
        return given
    for column in ANSWER_COLUMNS:
        if column in first.values:
            return column
    raise ConfigError(
        f"{first.place}: answer_column is not set, and there is neither 'answer' nor 'solution' among the columns "
        f"{_names(first)}; set data.answer_column to one of them"
    )


def messages_of(row: Row, column: str, system_prompt: str | None) -> list[Message]:
    """Return the conversation that the model must continue."""
    value = _value(row, column, "prompt_column")
    if isinstance(value, str) and value:
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value):
        messages = value
    else:
        raise ConfigError(
            f"{row.place}: {column}={_short(value)} is neither a text nor a list of messages with role and content; "
            "correct or remove the row"
        )
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{row.place}: {column} ends with an assistant message; end it with what the model must answer")
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError(
            f"{row.place}: {column} begins with a system message and data.system_prompt is set too; leave one of them out"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def answer_of(row: Row, column: str) -> str:
    """Return the gold answer as text."""
    value = _value(row, column, "answer_column")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value.strip()):
        return str(value)
    raise ConfigError(f"{row.place}: {column}={_short(value)} is no answer; give a text or a number, or remove the row")


def _value(row: Row, column: str, key: str) -> Any:
    """Return a column's value. A lone surrogate is an error: a replacement would train on a text that is not the row's."""
    if column not in row.values:
        raise ConfigError(f"{row.place}: {key}={column!r} is not a column of this row; its columns are: {_names(row)}")
    if surrogate := find_surrogate(row.values[column]):
        raise ConfigError(
            f"{row.place}: {column} has the lone surrogate {surrogate}, which is no character; write the character that was "
            "meant, or U+FFFD"
        )
    return row.values[column]


def _names(row: Row) -> str:
    return ", ".join(map(str, row.values)) or "none"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
