"""A restored policy continues like the saved one in any layout. A state whose masters do not match the weights is
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.ranks import Results, launch

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return errors by case. Two ranks save and restore, one and three restore the same checkpoints, four share a
    save.
    """
    folder = tmp_path_factory.mktemp("restore")
    results: Results = {}
    for world_size in (2, 1, 3, 4):
        results |= launch(Path(__file__).with_name("restore_worker.py"), world_size, folder)
    return results


def test_a_restored_policy_continues_like_the_saved_one_in_any_layout(found: Results) -> None:
    apart = ("iterated", "shifted", "shares")
    wrong = [line for case, lines in found.items() for line in lines if not any(word in case for word in apart)]
    assert found and not wrong, "\n".join(wrong)


def test_iterated_steps_equal_their_replay_in_any_layout_and_after_restore(found: Results) -> None:
    cases = {case: lines for case, lines in found.items() if case.startswith("iterated")}
    assert len(cases) == 7 and not any(cases.values()), "\n".join(line for lines in cases.values() for line in lines)


def test_optimizer_state_of_other_weights_is_refused_by_all_ranks(found: Results) -> None:
    """Megatron saves such a state without compat.save_optimizer_state_in_place. The patch can go when this test
    fails.
    """
    shifted = {case: lines for case, lines in found.items() if "shifted" in case}
    assert shifted and not any(shifted.values()), shifted


def test_data_parallel_ranks_share_saving_and_restoring(found: Results) -> None:
    shared = {case: lines for case, lines in found.items() if "shares" in case}
    assert len(shared) == 2 and not any(shared.values()), shared
