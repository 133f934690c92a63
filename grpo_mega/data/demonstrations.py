"""Load demonstrations for sft: chats whose assistant messages are trained, as tokens with a loss mask by turns.

The tokens of a turn follow the tokens of the prompt with which an engine would generate it. So a chat is one segment of
tokens if each of these prompts continues the text before it. If the template changes earlier turns, for example removes
their thoughts, a turn starts another segment with the prompt as the template renders it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from grpo_mega.config.data import DataConfig, DataSource
from grpo_mega.data.chat import Renderer, find_closing
from grpo_mega.data.rows import Conversation, read_demonstrations
from grpo_mega.errors import ConfigError
from grpo_mega.types import Prompt

_MOST_SHOWN = 400  # maximum number of characters of the first row in the log


@dataclass(frozen=True)
class Segment:
    """Tokens up to the first trained turn, the tokens from there on, and the ranges (start, end) of trained ones."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    trained: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class Demonstration(Prompt):
    """A row of sft. `text` is the prompt of its last turn, and `answer` has all trained texts."""

    segments: tuple[Segment, ...] = ()


def load_demonstrations(
    source: DataSource, config: DataConfig, tokenizer: Any, *, stop_ids: Collection[int], first_id: int = 0
) -> tuple[list[Demonstration], int, str]:
    """Return the rows of one set in order, the number of rows dropped as too long, and a line for the log.

    Raises ConfigError if the set is unreadable or empty, a row is bad, the chat template is missing, or all rows are
    too long.
    """
    renderer, (closing, stops) = Renderer(tokenizer), find_closing(tokenizer, stop_ids)
    conversations = read_demonstrations(source, config)
    by_row = [_pieces_of(one, renderer, closing) for one in conversations]
    texts = [text for pieces_of_row in by_row for pieces in pieces_of_row for text in accumulate(pieces)]
    encoded = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    rows = []
    for one, pieces_of_row in zip(conversations, by_row, strict=True):
        segments = tuple(
            _segment(tokenizer, pieces, [next(encoded) for _ in pieces], one.place) for pieces in pieces_of_row
        )
        if max(segment.num_tokens for segment in segments) <= config.max_length:
            text = "".join(pieces_of_row[-1][:-1])
            answer = "".join(turn for pieces in pieces_of_row for turn in pieces[1::2])
            rows.append(Demonstration(first_id + one.index, text, segments[-1].prompt_ids, answer, segments=segments))
    num_too_long = len(conversations) - len(rows)
    if not rows:
        raise ConfigError(
            f"data.max_length={config.max_length}: must hold a row, but drops all {num_too_long} of {source.path};"
            " raise it"
        )
    all_segments = [segment for row in rows for segment in row.segments]
    num_trained = sum(end - start for segment in all_segments for start, end in segment.trained)
    first = "".join(f"\u00ab{text}\u00bb" if i % 2 else text for i, text in enumerate(by_row[0][0]))
    first = first.replace("\n", "\\n")
    first = first if len(first) <= _MOST_SHOWN else f"{first[:_MOST_SHOWN]}..."
    note = (
        f"{source.path}: {len(rows)} rows with {sum(segment.num_tokens for segment in all_segments):,} tokens,"
        f" {num_trained:,} of them trained{f', {num_too_long} dropped as too long' if num_too_long else ''}; the first"
        f" row, with trained text in \u00ab\u00bb: {first}"
    )
    if not stops:
        note += (
            f"\nthe chat template ends a turn with {closing!r}, which no eos id of the model names; add its token to"
            " rollout.stop_token_ids of train, or to eos_token_id in generation_config.json"
        )
    return rows, num_too_long, note


def _pieces_of(one: Conversation, renderer: Renderer, closing: str) -> list[list[str]]:
    """Return the texts of each segment: in turn a context and the trained turn after it."""
    segments: list[list[str]] = []
    for number, message in enumerate(one.messages):
        if message["role"] == "assistant" and number >= one.num_given:
            before = renderer.render(one.messages[:number], one.place)
            turn = renderer.render_turn(one.messages[: number + 1], before, closing, one.place)
            known = "".join(segments[-1]) if segments else None
            if known is not None and before.startswith(known):
                segments[-1] += [before.removeprefix(known), turn]
            else:
                segments.append([before, turn])
    return segments


def _segment(tokenizer: Any, pieces: list[str], encoded: list[list[int]], place: str) -> Segment:
    """Return the tokens of the pieces. encoded[i] are the tokens of the text up to piece i.

    If a token would have text of two pieces, the second one is tokenised alone, because an engine continues the tokens
    of its prompt.
    """
    token_ids: list[int] = []
    cuts = [0]
    for piece, whole in zip(pieces, encoded, strict=True):
        if whole[: cuts[-1]] != token_ids:
            text = tokenizer.decode(whole)
            whole = [*token_ids, *tokenizer(piece, add_special_tokens=False)["input_ids"]]
            if tokenizer.decode(whole) != text:
                raise ConfigError(
                    f"{place}: the tokenizer cannot separate {piece[:60]!r} from the text before it; correct or remove"
                    " the row"
                )
        token_ids = whole
        cuts.append(len(whole))
    first = cuts[1]
    trained = tuple((start - first, end - first) for start, end in zip(cuts[1::2], cuts[2::2], strict=True))
    return Segment(tuple(token_ids[:first]), tuple(token_ids[first:]), trained)
