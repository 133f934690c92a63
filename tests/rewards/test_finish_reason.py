"""Reward functions of any signature know whether a response was cut at the length limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_mega.rewards.scorer import Scorer
from grpo_mega.types import Group, Prompt, Sample
from tests.helpers.reward_pools import reward_pool

TEXTS = ["So 40 + 11 is 51", "So 40 + 11 is 51", "The sum is 40 + 11"]  # correct; correct but cut off; not evaluated
REASONS = ["stop", "length", "stop"]
TELL, HEARD, NAMED = "user_functions.tell_finish_reason", "trl_functions.Heard", "trl_functions.paid_if_finished"


@pytest.fixture(autouse=True)
def _user_functions_are_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent))
    yield


def scored(*names: str, options: dict[str, dict[str, Any]] | None = None) -> list[Sample]:
    """Score a group of TEXTS. The data also has a column named finish_reason."""
    prompt = Prompt(3, "40+11?", (1,), "51", extras={"finish_reason": "a column"}, raw_columns={"prompts": "40+11?"})
    samples = [Sample(prompt, i, [i], [-1.0], reason) for i, reason in enumerate(REASONS)]  # type: ignore[arg-type]
    with reward_pool([(name, 1.0) for name in names], options=options) as pool:
        scorer = Scorer(pool, lambda ids: TEXTS[ids[0]])
        for sample in samples:
            scorer.submit(sample)
        scorer.submit_group(samples)
        scorer.keep([Group(prompt, samples)])
        scorer.finish()
    return samples


def test_a_function_gets_the_finish_reason_and_a_trl_function_gets_a_list() -> None:
    samples = scored(TELL, HEARD, NAMED)
    assert [sample.verdicts[TELL] for sample in samples] == REASONS
    heard = [json.loads(sample.verdicts[HEARD])["finish_reason"] for sample in samples]
    assert heard == [REASONS] * 3
    assert [sample.scores[NAMED] for sample in samples] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("unevaluated", [False, True])
def test_cut_off_or_unevaluated_answers_get_none_of_the_three_rewards(unevaluated: bool) -> None:
    options = {"accuracy": {"unevaluated": unevaluated}}
    samples = scored("accuracy", "len", "cosine", options=options)
    expected = [True, False, unevaluated]
    for name in ("accuracy", "len", "cosine"):
        assert [sample.verdicts[name] == "correct" for sample in samples] == expected, name
    assert [(sample.scores["cosine"] or 0.0) > 0 for sample in samples] == expected
    if not unevaluated:
        alone = scored("len", "cosine")
        assert [sample.scores["cosine"] for sample in alone] == [sample.scores["cosine"] for sample in samples]
        assert [sample.scores["len"] for sample in alone] == [sample.scores["len"] for sample in samples]


def test_rewards_for_lengths_count_the_text_of_sampled_tokens() -> None:
    text = "So 40 + 11 is <tool>some long result</tool>51"
    prompt = Prompt(3, "40+11?", (1,), "51", raw_columns={"prompts": "40+11?"})
    whole, plain = (Sample(prompt, i, list(map(ord, text)), [], "stop") for i in range(2))
    whole.sampled = [(0, 14), (len(text) - 2, len(text))]
    short = Sample(prompt, 2, list(map(ord, "So 40 + 11 is 51")), [], "stop")
    samples = [whole, plain, short]
    with reward_pool([(name, 1.0) for name in ("len", "cosine")]) as pool:
        scorer = Scorer(pool, lambda ids: "".join(map(chr, ids)))
        for sample in samples:
            scorer.submit(sample)
        scorer.submit_group(samples)
        scorer.finish()
    for name in ("cosine", "len"):
        values = [sample.scores[name] for sample in samples]
        assert values[0] == values[2] and (values[1] or 0) < (values[0] or 0), (name, values)
