"""Phases that begin more prompts than they want groups, on two ranks: phase_worker.py, one launch, holds the assertions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import Results, launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(Path(__file__).with_name("phase_worker.py"), 2, tmp_path_factory.mktemp("phase"))


def check(results: Results, case: str) -> None:
    assert not results[case], "\n".join(results[case])


def test_the_groups_that_go_on_are_the_first_by_tokens_whatever_the_ranks_speed_and_equal_those_of_a_whole_phase(
    results: Results,
) -> None:
    check(results, "keeps_the_first")


def test_batches_of_a_rank_come_one_after_the_other_in_the_order_of_the_prompts(results: Results) -> None:
    check(results, "keeps_the_first_of_several_batches")


def test_what_is_begun_kept_and_thrown_away_is_counted_alike_on_all_ranks(results: Results) -> None:
    check(results, "counts_what_is_thrown_away")


def test_what_is_unfinished_goes_on_to_the_same_samples_whatever_the_ranks_speed(results: Results) -> None:
    check(results, "goes_on_with_what_is_unfinished")


def test_a_phase_leaves_no_keys_in_the_store(results: Results) -> None:
    check(results, "leaves_no_keys_in_the_store")
