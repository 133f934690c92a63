"""Verdicts on responses as models write them, against what a careful reader says of each (corpus.jsonl).

A row is {"source", "family", "gold", "response", "right", "batch"}. Batches 2 and 3 were written after the code, each without a
look at it, and read once before any of their rows led to a change: 126 of 132 and 48 of 53 verdicts were right then. Batches 4
to 8 are the five rounds of grpo_mega/rewards/README.md, with the figures of their first reading; what they miss is mostly form.
`tools/conformance/reward_agreement.py` compares other checkers.
"""

from collections import Counter

import pytest

from grpo_mega.rewards.math.accuracy import accuracy
from tools.conformance.reward_agreement import CORPUS, Row, load_rows

# By batch. Those of batches 4 to 8 guard what is reached against regressions; the first-read figures are in the README.
MIN_AGREEMENT = {1: 0.97, 2: 0.97, 3: 0.97, 4: 0.98, 5: 0.82, 6: 0.95, 7: 0.72, 8: 0.76}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return load_rows()


def test_the_corpus_is_large_varied_and_half_of_it_wrong(rows: list[Row]) -> None:
    assert len(rows) >= 400 and sum(row.batch > 1 for row in rows) >= 100
    assert len({(row.gold, row.response) for row in rows}) == len(rows)
    assert 0.4 <= sum(row.right for row in rows) / len(rows) <= 0.6
    assert {"gsm8k", "math", "aime", "amc", "qwen", "llama", "r1", "gpt"} <= {row.source for row in rows}
    assert len({row.family for row in rows}) >= 30 and max(Counter(row.response for row in rows).values()) <= 5
    text = CORPUS.read_text(encoding="utf-8")
    assert "\u2028" in text and text.count("\n") == len(rows), "lines end at newlines alone"


@pytest.mark.parametrize("batch", MIN_AGREEMENT)
def test_verdicts_are_those_of_a_careful_reader(rows: list[Row], batch: int) -> None:
    some = [row for row in rows if row.batch == batch]
    scores = [accuracy("", row.response, row.gold, {}) for row in some]
    missed = [(row.gold, row.response, row.right) for row, score in zip(some, scores, strict=True) if score.value != row.right]
    assert len(missed) <= (1 - MIN_AGREEMENT[batch]) * len(some), missed


def test_no_wrong_answer_of_the_rounds_is_paid(rows: list[Row]) -> None:
    fresh = [row for row in rows if row.batch >= 4 and not row.right]
    assert len(fresh) >= 150
    assert [row.response for row in fresh if accuracy("", row.response, row.gold, {}).value == 1.0] == []
