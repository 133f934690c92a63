"""The script of the loss curves runs: a step per recipe, a table and a plot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.te_on_cpu import curves


def test_the_curves_of_recipes_are_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["--seeds", "0", "--steps", "2", "--per-step", "2"]
    monkeypatch.setattr(sys, "argv", ["curves.py", str(tmp_path), "--recipes", "bf16", "blockwise", *sizes])
    curves.main()
    found = json.loads((tmp_path / "curves.json").read_text())
    assert [row["recipe"] for row in found["table"]] == ["bf16", "blockwise"] and (tmp_path / "curves.png").exists()
    bf16, blockwise = (run["losses"] for run in found["runs"])
    assert len(bf16) == 2 and bf16 != blockwise and blockwise == pytest.approx(bf16, rel=0.1)
