"""Phases that start more prompts than the number of wanted groups, on two ranks. phase_worker.py has the assertions."""

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


def test_a_phase_keeps_the_first_groups_by_tokens_at_any_speed_of_ranks(
    results: Results,
) -> None:
    check(results, "keeps_the_first")


def test_batches_of_a_rank_run_one_by_one_in_the_order_of_the_prompts(results: Results) -> None:
    check(results, "keeps_the_first_of_several_batches")


def test_started_kept_and_discarded_groups_count_alike_on_all_ranks(results: Results) -> None:
    check(results, "counts_what_is_thrown_away")


def test_idle_slots_of_all_engines_are_reported(results: Results) -> None:
    check(results, "reports_idle_slots_of_all_engines")


def test_an_error_of_one_ranks_phase_is_raised_on_all_ranks(results: Results) -> None:
    check(results, "raises_an_error_of_one_rank_on_all_ranks")


def test_unfinished_groups_resume_to_the_same_samples_at_any_speed(results: Results) -> None:
    check(results, "goes_on_with_what_is_unfinished")


def test_a_phase_leaves_no_keys_in_the_store(results: Results) -> None:
    check(results, "leaves_no_keys_in_the_store")
