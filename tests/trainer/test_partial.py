"""Runs that start more groups than a step trains. They abort or carry over the surplus, and a resumed run does the
same.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import losses, read, run, stop_after
from tools.benchmarks import kills
from tools.benchmarks.kills import read_end

pytestmark = [pytest.mark.distributed, pytest.mark.waiting, pytest.mark.usefixtures("preloaded_python")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    return kills.write_inputs(tmp_path_factory.mktemp("inputs"), "dp=2", kills.PARTIAL, **layers)


@pytest.mark.full
def test_a_run_that_aborts_stragglers_aborts_the_same_ones_again(inputs: Path, tmp_path: Path) -> None:
    """Ranks sample at different speeds, but the embedded engine counts tokens, not time."""
    settings = ("--set", "rollout.partial=false", "--set", "rollout.oversample=1.5", "--set", "steps=6")
    kills.finish(kills.start(inputs, tmp_path / "whole", list(settings)), tmp_path / "whole")
    stop_after(inputs, tmp_path / "run", 2, *settings)
    code, output = run(inputs, tmp_path / "run", *settings, "--resume")
    assert code == 0, output
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert read_end(tmp_path / "run").weights == read_end(tmp_path / "whole").weights
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/aborted_tokens" in row]
    assert len(steps) == 6
    assert all((row["rollout/begun_groups"], row["rollout/aborted_groups"]) == (6, 2) for row in steps)
    assert all(row["rollout/kept_length"] == pytest.approx(row["response_length/mean"]) for row in steps)
    assert sum(row["rollout/aborted_tokens"] for row in steps) > 0


def test_resumed_partial_rollouts_keep_their_tokens_and_the_ledger_closes(inputs: Path, tmp_path: Path) -> None:
    settings = ("--set", "algorithm.recipe=partial", "--set", "steps=6")
    kills.finish(kills.start(inputs, tmp_path / "whole", list(settings)), tmp_path / "whole")
    stop_after(inputs, tmp_path / "run", 2, *settings)
    code, output = run(inputs, tmp_path / "run", *settings, "--resume")
    assert code == 0, output
    assert read_end(tmp_path / "run").weights == read_end(tmp_path / "whole").weights
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "ledger/begun_tokens" in row]
    expected = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert [told(row) for row in rows] == [told(row) for row in expected if "ledger/begun_tokens" in row] and len(
        rows
    ) == 6
    assert all(kills.closes(row) and row["ledger/begun_tokens"] for row in rows)
    assert [row["ledger/trained_groups"] for row in rows] == [4.0 * n for n in range(1, 7)]
    assert max(row["ledger/carried_tokens"] for row in rows) > 0 and not any(
        "dropped" in n for row in rows for n in row if row[n]
    )
    assert max(row["staleness/max"] for row in rows) in (1, 2)
    logged = [json.loads(line) for line in read(tmp_path / "run" / "samples.jsonl").split("\n") if line]
    spans = [row["spans"] for row in logged if "spans" in row]
    assert spans and all(s[0][1] == 0 and all(a[2] == b[1] for a, b in pairwise(s)) for s in spans)


def told(row: dict[str, Any]) -> dict[str, Any]:
    """Return a step's metrics without times, memory, throughput and idle engines."""
    measured = ("seconds", "memory", "tokens_per_second", "engine/")
    return {name: value for name, value in row.items() if not name.startswith(measured)}
