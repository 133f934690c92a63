"""The planner's bytes against Megatron's buffers: 48 layouts on 4 ranks, in one launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.planner_cases import CASES
from tests.helpers.ranks import launch

pytestmark = pytest.mark.distributed


@pytest.mark.full
def test_model_and_optimizer_bytes_are_exact_and_activations_are_close(tmp_path: Path) -> None:
    assert len(CASES) == 48
    problems = launch(Path(__file__).with_name("state_worker.py"), 4, tmp_path)
    assert not any(problems.values()), "\n".join(text for texts in problems.values() for text in texts)
