"""Weights in FP8 blocks from the trainer's ranks to those of engines: all in one launch, fp8_worker.py holds the assertions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import Results, launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch(Path(__file__).with_name("fp8_worker.py"), 4, tmp_path_factory.mktemp("ranks"))


def check(launched: Results, case: str) -> None:
    assert not launched[case], "\n".join(launched[case])


def test_in_every_layout_the_whole_tensor_quantised_naively_and_cut_arrives_in_half_the_bytes(
    launched: Results,
) -> None:
    layouts = {case: failures for case, failures in launched.items() if " to " in case}
    assert len(layouts) == 14
    assert not any(layouts.values()), layouts


def test_a_byte_that_changes_in_a_value_or_a_scale_stops_the_sync_and_its_tensor_is_named(launched: Results) -> None:
    check(launched, "names_a_flipped_byte")


def test_the_servers_loader_keeps_blocks_and_tells_what_differs_with_the_bucket(launched: Results) -> None:
    check(launched, "goes_through_the_servers_loader")


def test_without_proof_the_same_arrives(launched: Results) -> None:
    check(launched, "moves_nothing_more_without_proof")
