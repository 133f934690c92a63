"""The benchmark of shared prompts at a tiny size: it runs the trainer's updates, and both kinds have the same
gradient.
"""

from __future__ import annotations

import json

import pytest

from tools.benchmarks import share_prompts


def test_fewer_tokens_have_the_same_loss_and_gradient(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"num_hidden_layers": 2, "hidden_size": 40, "intermediate_size": 72, "head_dim": 8, "vocab_size": 307}
    monkeypatch.setattr(share_prompts, "MODEL", share_prompts.MODEL | tiny)
    share_prompts.main(["--prompt=33", "--response=5", "--samples=3", "--repeat=1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tokens"] == pytest.approx((32 + 3 * 6) / (3 * 38), rel=0.02)  # rows are rounded up
    assert found["gradient"] < 1e-6 and found["loss"] < 1e-6
    assert found["ratio"] == pytest.approx(found["seconds"][1] / found["seconds"][0], abs=0.2)
