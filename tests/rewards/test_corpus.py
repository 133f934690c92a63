"""Verdicts on realistic model responses, compared with the judgment of a careful reader (corpus.jsonl).

A row is {"source", "family", "gold", "response", "right", "batch"}. Batches 2 and 3 were written after the code and
without looking at it. At the first reading, before any of their rows led to a change, 126 of 132 and 48 of 53 verdicts
were right. Batches 4 to 8 are the five rounds of grpo_mega/rewards/README.md, which has their first-read figures. Most
rows that they miss are about form. `tools/conformance/reward_agreement.py` compares other checkers.
"""

from collections import Counter

import pytest

from grpo_mega.rewards.math.accuracy import accuracy
from tools.conformance.reward_agreement import CORPUS, Row, load_rows

# Per batch. The values of batches 4 to 8 only guard against regressions. The README has the first-read figures.
MIN_AGREEMENT = {1: 0.97, 2: 0.97, 3: 0.97, 4: 0.98, 5: 0.82, 6: 0.95, 7: 0.72, 8: 0.76}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return load_rows()


def test_the_corpus_is_large_and_varied_and_half_of_it_is_wrong(rows: list[Row]) -> None:
    assert len(rows) >= 400 and sum(row.batch > 1 for row in rows) >= 100
    assert len({(row.gold, row.response) for row in rows}) == len(rows)
    assert 0.4 <= sum(row.right for row in rows) / len(rows) <= 0.6
    assert {"gsm8k", "math", "aime", "amc", "qwen", "llama", "r1", "gpt"} <= {row.source for row in rows}
    assert len({row.family for row in rows}) >= 30 and max(Counter(row.response for row in rows).values()) <= 5
    text = CORPUS.read_text(encoding="utf-8")
    assert "\u2028" in text and text.count("\n") == len(rows), "only newlines end lines"


@pytest.mark.parametrize("batch", MIN_AGREEMENT)
def test_verdicts_agree_with_a_careful_reader(rows: list[Row], batch: int) -> None:
    some = [row for row in rows if row.batch == batch]
    scores = [accuracy("", row.response, row.gold, {}) for row in some]
    missed = [
        (row.gold, row.response, row.right) for row, score in zip(some, scores, strict=True) if score.value != row.right
    ]
    assert len(missed) <= (1 - MIN_AGREEMENT[batch]) * len(some), missed


def test_no_wrong_answer_of_the_rounds_is_rewarded(rows: list[Row]) -> None:
    fresh = [row for row in rows if row.batch >= 4 and not row.right]
    assert len(fresh) >= 150
    assert [row.response for row in fresh if accuracy("", row.response, row.gold, {}).value == 1.0] == []
