"""Token dispatchers and longer rows change no loss and no gradient. DeepEP's kernels are replaced on CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.ranks import Results, launch

pytestmark = [pytest.mark.distributed, pytest.mark.full]

WORKER = Path(__file__).with_name("dispatcher_worker.py")
LOSSES = ("model.router.balancing=seq_aux_loss", "model.router.aux_loss_coeff=0.1", "model.router.z_loss_coeff=0.01")
CASES = (
    ("dp=2,ep=2", "alltoall", *LOSSES),
    ("dp=2,ep=2", "hybridep", *LOSSES),
    ("dp=2,ep=2", "hybridep", "model.recompute=full"),
    ("dp=2,ep=2", "hybridep", "model.router.capacity_factor=0.7"),
    ("dp=2,ep=2", "deepep", *LOSSES),
    ("dp=2,ep=2", "deepep", "model.router.capacity_factor=0.7"),
    ("tp=2,ep=2,sequence_parallel=true", "hybridep"),
    ("tp=2,etp=2,sequence_parallel=true", "hybridep"),
    ("tp=2,etp=2,sequence_parallel=true", "deepep"),
    ("cp=2,ep=2", "hybridep"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("dispatchers")
    (folder / "cases.json").write_text(json.dumps(CASES))
    return launch(WORKER, 2, folder)


@pytest.mark.parametrize("case", [" ".join(case) for case in CASES])
def test_dispatchers_and_padding_change_no_loss_and_no_gradient(results: Results, case: str) -> None:
    """A rank's rows are padded to 128 tokens for HybridEP, and to 256 in the case of alltoall."""
    assert results[case] == []
