"""`grpo-mega check`: users verify for their own model and data that a layout does not change the numbers."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.cli.commands import check
from grpo_mega.cli.commands.check import TOLERANCE, Difference, _worst, outcome_table
from grpo_mega.config import load
from grpo_mega.errors import ConfigError
from tools.benchmarks import kills

pytestmark = pytest.mark.usefixtures("preloaded_python")

SAME = Difference(
    name="tp=2",
    loss=1e-8,
    grad_norm=1e-7,
    logprobs=1e-7,
    ref_logprobs=1e-7,
    weights=1e-7,
    metrics=1e-7,
    clipped_tokens=0,
    num_tokens=1500,
)


@pytest.mark.distributed
@pytest.mark.waiting
def test_check_prints_a_line_per_layout_and_succeeds_if_all_are_equal(tmp_path: Path) -> None:
    config = kills.write_inputs(tmp_path, "tp=1")
    command = [sys.executable, "-m", "grpo_mega.cli", "check", str(config), "--set", "run_dir=unused"]
    environment_root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [*command, "--set", "rewards={}", "--layouts", "tp=2 pp=2,layers_per_chunk=[1;1] cp=2"],
        capture_output=True,
        text=True,
        cwd=environment_root,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    shown = [line for line in result.stdout.splitlines() if line.startswith("check: ")]
    assert shown == [
        "check: generating samples on one rank",
        "check: one rank",
        "check: tp=2",
        "check: pp=2,layers_per_chunk=[1;1]",
        "check: cp=2",
    ]
    lines = [line for line in result.stdout.splitlines() if line.endswith("same")]
    assert [line.split()[0] for line in lines] == ["tp=2", "pp=2,layers_per_chunk=[1;1]", "cp=2"]


def test_the_layout_whose_ranks_failed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        (tmp_path / "0").mkdir()
        torch.save(None, tmp_path / "0" / "outcome.pt")
        return 3

    monkeypatch.setattr(check, "launch_processes", fail)
    config = load(kills.write_inputs(tmp_path, "tp=1"), ["run_dir=unused"])
    with pytest.raises(ConfigError, match=r"^pp=2: its ranks ended with code 3"):
        check.run_cases([check.Case("tp=1", config), check.Case("pp=2", config), check.Case("x", config)], tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"loss": 1e-3},
        {"grad_norm": 0.3},
        {"logprobs": 1e-3},
        {"ref_logprobs": 1e-3},
        {"weights": 1e-3},
        {"metrics": 1e-3},
        {"clipped_tokens": 2},
    ],
)
def test_a_difference_beyond_rounding_is_reported(change: dict[str, float]) -> None:
    different = replace(SAME, name="pp=2", **change)
    assert SAME.is_within(1e-5) and not different.is_within(1e-5)
    first, second = outcome_table([SAME, different], 1e-5).splitlines()[1:]
    assert first.endswith("same") and second.endswith("DIFFERS")


def test_more_tokens_are_at_the_edge_of_the_clip_range_in_bf16() -> None:
    """Measured: up to 6 of about 1,500 tokens, because bf16 rounds their ratios by about 1%."""
    few, many = replace(SAME, clipped_tokens=6), replace(SAME, clipped_tokens=60)
    assert few.is_within(TOLERANCE["bfloat16"]) and not few.is_within(TOLERANCE["float32"])
    assert not many.is_within(TOLERANCE["bfloat16"])


def test_a_difference_that_is_not_a_number_is_reported() -> None:
    assert not replace(SAME, logprobs=float("nan")).is_within(1e-5)
    assert math.isnan(_worst([1e-8, float("nan"), 1e-9])) and _worst([]) == 0.0


def test_a_layout_that_cannot_run_is_refused_before_any_rank_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from grpo_mega.cli import main

    config = kills.write_inputs(tmp_path, "tp=1")
    assert main(["check", str(config), "--set", "run_dir=unused", "--layouts", "tp=2 tp=3"]) == 2
    assert "layout.tp=3 does not divide" in capsys.readouterr().err
