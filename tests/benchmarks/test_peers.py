"""Benchmarks that compare with another project need its package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tools.benchmarks import harness

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    "tools/benchmarks/rewards.py",
    "tools/benchmarks/logprobs.py",
    "tools/benchmarks/vs_trl",
    "tools/conformance/reward_agreement.py",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_peer_is_one_line_with_the_command_that_installs_it(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("trl ") and "pip install -e '.[peers]'" in line and line.count("\n") == 1


def test_an_installed_peer_is_accepted() -> None:
    harness.require("torch", "json")
