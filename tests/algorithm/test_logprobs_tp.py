"""vocab_parallel_logprobs at TP1, TP2 and TP4, compared with its oracle. One launch runs all cases."""

from pathlib import Path

import pytest

from tests.helpers.ranks import launch


@pytest.mark.distributed
def test_any_vocabulary_split_has_values_and_gradients_of_the_oracle(tmp_path):
    results = launch(Path(__file__).with_name("logprobs_tp_worker.py"), 4, tmp_path)
    assert len(results) == 3 * 13 + 1
    assert not any(results.values()), results
