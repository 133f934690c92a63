"""Reads a data set into Prompts: rows of a file, rendered by the tokenizer's chat template and tokenised.

A row is a mapping with a prompt (a string, which becomes a user message, or a list of messages) and an answer; its
other columns travel in `Prompt.extras`. A prompt's id is the index of its line in the file, whatever is dropped. Prompts
longer than the limit are dropped and counted. A bad row raises ConfigError with file:line and the remedy; none is
skipped silently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_mega.data.chat import check_chat_template, find_prefill, render
from grpo_mega.errors import ConfigError
from grpo_mega.types import Prompt

Message = dict[str, Any]


@dataclass(frozen=True)
class DatasetReport:
    """What `load_prompts` found; lengths are in tokens."""

    path: Path
    num_rows: int
    num_prompts: int
    num_too_long: int
    longest: int  # of the prompts kept
    prefill: str

    def __str__(self) -> str:
        dropped = f", {self.num_too_long} dropped as too long" if self.num_too_long else ""
        return f"{self.path}: {self.num_prompts} prompts of at most {self.longest} tokens{dropped}"


def load_prompts(
    path: Path,
    *,
    tokenizer: Any,
    prompt_column: str,
    answer_column: str,
    system_prompt: str | None,
    max_prompt_length: int,
) -> tuple[list[Prompt], DatasetReport]:
    """The prompts of `path` in the file's order, and a report. `tokenizer` is a Hugging Face one with a chat template.

    Raises ConfigError for an unreadable or empty file, a bad row, a missing chat template, or prompts all too long.
    """
    check_chat_template(tokenizer)
    rows = list(_read_rows(path))
    if not rows:
        raise ConfigError(f"data file {path} is empty; it needs one row a prompt")
    prefill = find_prefill(tokenizer)
    texts: list[str] = []
    answers: list[str] = []
    for index, row in rows:
        place = f"{path}:{index + 1}"
        messages = _messages(row, prompt_column, system_prompt, place)
        answers.append(_answer(row, answer_column, place))
        texts.append(render(tokenizer, messages, place))
    all_token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    prompts = [
        Prompt(
            id=index,
            text=text,
            token_ids=tuple(token_ids),
            answer=answer,
            prefill=prefill if text.endswith(prefill) else "",
            extras={column: value for column, value in row.items() if column not in (prompt_column, answer_column)},
        )
        for (index, row), text, token_ids, answer in zip(rows, texts, all_token_ids, answers, strict=True)
        if len(token_ids) <= max_prompt_length
    ]
    if not prompts:
        shortest = min(len(token_ids) for token_ids in all_token_ids)
        raise ConfigError(
            f"data.max_prompt_length={max_prompt_length} drops all {len(rows)} prompts of {path}; "
            f"the shortest has {shortest} tokens, so raise it to at least that"
        )
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return prompts, DatasetReport(path, len(rows), len(prompts), len(rows) - len(prompts), longest, prefill)


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row index, row) of a data file, by its suffix; another format is one more reader here."""
    readers = {".jsonl": _read_jsonl}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"data file {path} has suffix {path.suffix!r}; the formats read are {', '.join(readers)}")
    return reader(path)


def _read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for index, line in enumerate(lines):
                if line.strip():
                    yield index, _parse_row(line, f"{path}:{index + 1}")
    except OSError as error:
        raise ConfigError(f"data file {path}: {error.strerror}; name an existing file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"data file {path} is not UTF-8 ({error.reason}); write it as UTF-8") from None


def _parse_row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        what = f"{error.msg}, column {error.colno}"
        raise ConfigError(f"{place} is not JSON ({what}); write one JSON object a line") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{place} holds a JSON {type(row).__name__}, not an object; write one JSON object a line")
    return row


def _messages(row: dict[str, Any], column: str, system_prompt: str | None, place: str) -> list[Message]:
    value = _column(row, column, "prompt_column", place)
    if isinstance(value, str) and value:
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value and all(map(_is_message, value)):
        messages = value
    else:
        raise ConfigError(
            f"{place}: {column}={_short(value)} is neither a text nor a list of messages with role and content; "
            "mend or remove the row"
        )
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: {column} ends with an assistant message; end it with what the model must answer")
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise ConfigError(
            f"{place}: {column} begins with a system message and data.system_prompt is set too; leave one of them out"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and {"role", "content"} <= value.keys()


def _answer(row: dict[str, Any], column: str, place: str) -> str:
    value = _column(row, column, "answer_column", place)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value.strip()):
        return str(value)
    raise ConfigError(f"{place}: {column}={_short(value)} is no answer; give a text or a number, or remove the row")


def _column(row: dict[str, Any], column: str, key: str, place: str) -> Any:
    if column not in row:
        columns = ", ".join(map(str, row)) or "none"
        raise ConfigError(f"{place}: data.{key}={column!r} is not a column of this row; its columns are: {columns}")
    return row[column]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
