"""vocab_parallel_logprobs on two tensor-parallel ranks: many cases in one launch, since a launch is mostly imports."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLD_SIZE = 2


@pytest.mark.distributed
def test_two_ranks_with_half_of_the_vocabulary_each_equal_the_naive_twin(tmp_path):
    worker = Path(__file__).parent / "logprobs_tp_worker.py"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(WORLD_SIZE), str(tmp_path / "store")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, "\n".join(errors)
