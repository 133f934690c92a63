"""Saves by three ranks of one node. All cases run in one launch; checkpoints_worker.py has the assertions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import Results, launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(Path(__file__).with_name("checkpoints_worker.py"), 3, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(
    "case",
    [
        "becomes_visible_without_the_main_threads",
        "goes_back",
        "stages_in_private",
        "stages_on_the_disk",
        "writes_in_place_what_is_in_memory_anyway",
        "names_what_was_not_written",
        "leaves_nothing_after_an_error",
        "warns_where_nothing_could_train",
        "notices_another_start_model",
    ],
)
def test_a_save(results: Results, case: str) -> None:
    assert not results[case], "\n".join(results[case])
