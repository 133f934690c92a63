"""The engine mismatch by staleness, compared with numbers worked out by hand. Limits apply to tokens that are not
stale.
"""

from __future__ import annotations

import math

import pytest
import torch

from grpo_mega.tracking.metrics import engine_mismatch
from grpo_mega.trainer.batches import staleness_metrics
from grpo_mega.types import Prompt, Sample, Span

PROMPT = Prompt(0, "", (1,), "")


def test_each_trained_token_counts_with_the_version_of_its_span() -> None:
    mixed = Sample(PROMPT, 0, [5, 6, 7], [-1.0, -2.0, -0.5], "stop", [Span(3, 0, 1), Span(5, 1, 3)])
    fresh = Sample(PROMPT, 1, [5], [-0.25], "stop", [Span(5, 0, 1)])
    left_out = Sample(PROMPT, 2, [5, 5], [-9.0, -9.0], "stop", [Span(4, 0, 2)])
    old = [torch.tensor([-1.5, -2.0, -0.25]), torch.tensor([-0.25]), torch.tensor([math.nan, math.nan])]
    found = staleness_metrics([mixed, fresh, left_out], old, version=5)
    assert found == pytest.approx(
        {
            "staleness/mean": 2 / 4,
            "staleness/max": 2.0,
            "mismatch/k3_stale_0": (math.exp(0.25) - 1.25) / 3,
            "mismatch/k3_stale_2": math.exp(-0.5) - 0.5,
        }
    )
    assert staleness_metrics([left_out], old[2:], version=5) == {}
    assert engine_mismatch(found | {"mismatch/k3": 7.0}) == found["mismatch/k3_stale_0"]
    assert engine_mismatch({"mismatch/k3": 7.0}) == 7.0
