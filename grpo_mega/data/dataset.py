"""Reads a data set into Prompts: its rows, rendered by the tokenizer's chat template and tokenised.

A row's other columns travel in `Prompt.extras`. A prompt's id is `first_id` plus the row's index in the set, whatever is
dropped. Prompts longer than the limit are dropped and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_mega.data.chat import check_chat_template, find_prefill, render
from grpo_mega.data.rows import answer_of, find_answer_column, load_rows, messages_of
from grpo_mega.errors import ConfigError
from grpo_mega.types import Prompt


@dataclass(frozen=True)
class DatasetReport:
    """What `load_prompts` found; lengths are in tokens."""

    path: str
    num_rows: int
    num_prompts: int
    num_too_long: int
    longest: int  # of the prompts kept
    prefill: str

    def __str__(self) -> str:
        dropped = f", {self.num_too_long} dropped as too long" if self.num_too_long else ""
        return f"{self.path}: {self.num_prompts} prompts of at most {self.longest} tokens{dropped}"


def load_prompts(
    path: str,
    *,
    tokenizer: Any,
    prompt_column: str,
    answer_column: str | None,
    system_prompt: str | None,
    max_prompt_length: int,
    first_id: int = 0,
) -> tuple[list[Prompt], DatasetReport]:
    """The prompts of `path` (see sources.py) in its order, and a report. `tokenizer` is a Hugging Face one.

    Raises ConfigError for an unreadable or empty set, a bad row, a missing chat template, or prompts all too long.
    """
    check_chat_template(tokenizer)
    rows = load_rows(path)
    answers_from = find_answer_column(rows[0], answer_column)
    prefill = find_prefill(tokenizer)
    answers = [answer_of(row, answers_from) for row in rows]
    texts = [render(tokenizer, messages_of(row, prompt_column, system_prompt), row.place) for row in rows]
    all_token_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    used_columns = (prompt_column, answers_from)
    prompts = [
        Prompt(
            id=first_id + row.index,
            text=text,
            token_ids=tuple(token_ids),
            answer=answer,
            prefill=prefill if text.endswith(prefill) else "",
            extras={column: value for column, value in row.values.items() if column not in used_columns},
        )
        for row, text, token_ids, answer in zip(rows, texts, all_token_ids, answers, strict=True)
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
