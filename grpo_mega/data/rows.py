"""From a row to what a prompt needs of it: messages and a gold answer. Needs no tokenizer, so all rows of a run's data are
checked before it starts (`check_rows`).

A prompt is a text, which becomes a user message, or a list of messages; an answer is a text or a number. A bad row raises
ConfigError with its place and the remedy, one with a lone surrogate in these too; none is skipped silently.
"""

from __future__ import annotations

from typing import Any

from grpo_mega.data.sources import Row, read_rows
from grpo_mega.errors import ConfigError
from grpo_mega.text import find_surrogate

Message = dict[str, Any]
ANSWER_COLUMNS = ("answer", "solution")  # where answer_column is not given, the first that the set has


def load_rows(path: str) -> list[Row]:
    """All rows of a data set; raises ConfigError if there are none."""
    rows = list(read_rows(path))
    if not rows:
        raise ConfigError(f"data set {path} is empty; it needs one row a prompt")
    return rows


def check_rows(path: str, *, prompt_column: str, answer_column: str | None, system_prompt: str | None) -> int:
    """The number of rows of a data set. Raises ConfigError for the first that would not make a prompt."""
    rows = load_rows(path)
    answers_from = find_answer_column(rows[0], answer_column)
    for row in rows:
        messages_of(row, prompt_column, system_prompt)
        answer_of(row, answers_from)
    return len(rows)


def find_answer_column(first: Row, given: str | None) -> str:
    """The answer's column, from the first row of a set: the one given, else `answer`, else `solution`."""
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
    """The conversation that the model must go on with."""
    value = _column(row, column, "prompt_column")
    if isinstance(value, str) and value:
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value and all(map(_is_message, value)):
        messages = value
    else:
        raise ConfigError(
            f"{row.place}: {column}={_short(value)} is neither a text nor a list of messages with role and content; "
            "mend or remove the row"
        )
    _check_text(row, column, value)
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
    """The gold answer as text."""
    value = _column(row, column, "answer_column")
    _check_text(row, column, value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value.strip()):
        return str(value)
    raise ConfigError(f"{row.place}: {column}={_short(value)} is no answer; give a text or a number, or remove the row")


def _check_text(row: Row, column: str, value: Any) -> None:
    """A tokenizer refuses lone surrogates. To replace them here would train on what the row does not say."""
    if found := find_surrogate(value):
        raise ConfigError(
            f"{row.place}: {column} has the lone surrogate {found}, which is no character; write the character that was meant, "
            "or U+FFFD"
        )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _column(row: Row, column: str, key: str) -> Any:
    if column not in row.values:
        raise ConfigError(f"{row.place}: {key}={column!r} is not a column of this row; its columns are: {_names(row)}")
    return row.values[column]


def _names(row: Row) -> str:
    return ", ".join(map(str, row.values)) or "none"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
