"""read_curves: each metric of a run by step."""

import json
from pathlib import Path

import pytest

from grpo_mega.errors import ConfigError
from grpo_mega.tracking.curves import read_curves


def test_the_last_line_of_a_step_counts_and_a_half_written_line_does_not(tmp_path: Path) -> None:
    rows = [{"step": 0, "a": 1.0}, {"step": 1, "a": 2.0}, {"step": 1, "a": 3.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "a"')
    assert read_curves(path) == {"a": {0: 1.0, 1: 3.0}}


def test_a_run_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; name the run_dir"):
        read_curves(tmp_path / "metrics.jsonl")
