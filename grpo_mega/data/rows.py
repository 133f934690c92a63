"""Turn rows into messages and gold answers. Needs no tokenizer, so all rows of a run's data are checked before it starts.

A prompt is a text, used as a user message, or a list of messages. An answer is a text or a finite number. A bad row, or a row
with a lone surrogate in these columns, raises ConfigError with its place and the remedy. No row is skipped silently.

The content of a message is a text, or a list of text parts, {"type": "text", "text": ...}, which are joined. The content may be
null in an assistant message with tool calls. A column name may lead into nested values: "reward_model.ground_truth".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from grpo_mega.config.data import DataConfig, DataSource
from grpo_mega.data.sources import MissingColumn, Row, find_value, read_rows
from grpo_mega.errors import ConfigError
from grpo_mega.text import find_surrogate

Message = dict[str, Any]
ANSWER_COLUMNS = ("answer", "solution")  # tried in this order if answer_column is not set
# Spellings of missing or infinite numbers by Python, pandas, JSON and other languages, in columns turned into text.
_NOT_FINITE = {"nan", "NaN", "NAN", *(f"{sign}{text}" for sign in ("", "+", "-") for text in ("inf", "Inf", "INF", "Infinity"))}


@dataclass(frozen=True)
class Conversation:
    index: int  # index of the row
    place: str  # file and line, for errors
    messages: list[Message]
    answer: str
    extras: dict[str, Any]  # other columns of the row
    raw_columns: dict[str, Any]  # see types.Prompt


def read_conversations(source: DataSource, config: DataConfig) -> list[Conversation]:
    """Return the conversations of a data set, in order. Raises ConfigError for the first bad row."""
    rows = list(read_rows(source.path))
    if not rows:
        raise ConfigError(f"data set {source.path} is empty; it needs one row per prompt")
    prompt_column = source.prompt_column or config.prompt_column
    answer_column = find_answer_column(rows[0], source.answer_column or config.answer_column)
    return [_conversation(row, prompt_column, answer_column, config.system_prompt) for row in rows]


def _conversation(row: Row, prompt_column: str, answer_column: str, system_prompt: str | None) -> Conversation:
    messages, answer = messages_of(row, prompt_column, system_prompt), answer_of(row, answer_column)
    extras = {column: value for column, value in row.values.items() if column not in (prompt_column, answer_column)}
    given = {column: find_value(row.values, column) for column in (prompt_column, answer_column)}
    given["prompts"] = given[prompt_column] if isinstance(given[prompt_column], str) and system_prompt is None else messages
    return Conversation(row.index, row.place, messages, answer, extras, given)


def find_answer_column(first: Row, given: str | None) -> str:
    """Return the answer column, from the first row of a set: the given one, else `answer`, else `solution`."""
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
    elif isinstance(value, list) and value:
        messages = [_message(row, f"{column}[{number}]", message) for number, message in enumerate(value)]
    else:
        raise ConfigError(
            f"{row.place}: {column}={_short(value)} is neither a text nor a list of messages with role and content; "
            "correct or remove the row"
        )
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{row.place}: {column} ends with an assistant message; end it with the message that the model must answer"
        )
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError(
            f"{row.place}: {column} starts with a system message and data.system_prompt is set too; leave one of them out"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def answer_of(row: Row, column: str) -> str:
    """Return the gold answer as text."""
    value = _value(row, column, "answer_column")
    if isinstance(value, Real | Decimal) and not isinstance(value, bool):
        if not (value.is_finite() if isinstance(value, Decimal) else -math.inf < value < math.inf):  # type: ignore[operator]
            raise ConfigError(
                f"{row.place}: {column}={value} is not finite, so every response would be wrong; correct or remove the row"
            )
        return str(value)
    if isinstance(value, str) and value.strip() in _NOT_FINITE:
        raise ConfigError(
            f"{row.place}: {column}={value!r} is a number that is not finite, written as text; correct or remove the row, "
            "or write \\infty for an infinite answer"
        )
    if isinstance(value, str) and value.strip():
        return value
    raise ConfigError(f"{row.place}: {column}={_short(value)} is not an answer; write a text or a number, or remove the row")


def _message(row: Row, key: str, message: Any) -> Message:
    """Return a message whose content is a text. Remove null keys, because Parquet columns fill them in."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise ConfigError(
            f"{row.place}: {key}={_short(message)} is not a message with role and content; correct or remove the row"
        )
    content = message.get("content")
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        content = ""
    if isinstance(content, list) and content:
        content = "".join(_text_of_part(row, f"{key}.content[{number}]", part) for number, part in enumerate(content))
    if not isinstance(content, str):
        raise ConfigError(
            f"{row.place}: {key}.content={_short(content)} is neither a text nor a list of text parts; correct the row"
        )
    return {name: value for name, value in message.items() if value is not None} | {"content": content}


def _text_of_part(row: Row, key: str, part: Any) -> str:
    """Return the text of {"type": "text", "text": ...}."""
    given = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if given.keys() == {"type", "text"} and given["type"] == "text" and isinstance(given["text"], str):
        return given["text"]
    raise ConfigError(
        f'{row.place}: {key}={_short(part)}: must be {{"type": "text", "text": ...}}, because prompts are text only; '
        "correct or remove the row"
    )


def _value(row: Row, column: str, key: str) -> Any:
    """Return the value of a column. A lone surrogate is an error, because a replacement would change the text."""
    try:
        value = find_value(row.values, column)
    except MissingColumn as error:
        raise ConfigError(f"{row.place}: {key}={column!r} is not a column of this row; {error}") from None
    if surrogate := find_surrogate(value):
        raise ConfigError(
            f"{row.place}: {column} has the lone surrogate {surrogate}, which is not a character; write the character that was "
            "meant, or U+FFFD"
        )
    return value


def _names(row: Row) -> str:
    return ", ".join(map(str, row.values)) or "none"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
