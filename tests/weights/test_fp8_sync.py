"""FP8 block weights from trainer ranks to engine ranks. All cases run in one launch; fp8_worker.py has the assertions."""

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


def test_every_layout_receives_naively_quantized_slices_in_half_the_bytes(
    launched: Results,
) -> None:
    layouts = {case: failures for case, failures in launched.items() if " to " in case}
    assert len(layouts) == 14
    assert not any(layouts.values()), layouts


def test_a_changed_byte_of_a_value_or_scale_is_an_error_with_its_tensor(launched: Results) -> None:
    check(launched, "names_a_flipped_byte")


def test_the_servers_loader_keeps_blocks_and_reports_differences(launched: Results) -> None:
    check(launched, "goes_through_the_servers_loader")


def test_without_verification_the_same_arrives(launched: Results) -> None:
    check(launched, "moves_nothing_more_without_proof")
