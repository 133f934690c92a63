"""Runs that replay the engine's experts, with partial rollouts, a resume and injected faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mega.distributed.launch import free_port
from tests.helpers.ranks import ROOT
from tests.helpers.runs import losses, metrics, run, stop_after
from tools.benchmarks import kills

pytestmark = [pytest.mark.distributed, pytest.mark.waiting, pytest.mark.usefixtures("preloaded_python")]

MODEL = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "layer_types": None,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 44,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rollout = kills.PARTIAL | {"routing_replay": True}
    return kills.write_inputs(tmp_path_factory.mktemp("inputs"), "dp=2,ep=2", rollout, **MODEL)


@pytest.mark.full
def test_experts_are_replayed_over_partial_rollouts_and_a_resume(inputs: Path, tmp_path: Path) -> None:
    settings = ("--set", "algorithm.recipe=partial", "--set", "steps=5")
    kills.finish(kills.start(inputs, tmp_path / "whole", list(settings)), tmp_path / "whole")
    stop_after(inputs, tmp_path / "run", 2, *settings)
    code, output = run(inputs, tmp_path / "run", *settings, "--resume")
    assert code == 0, output
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    moved = [[row.get("routing/moved") for row in metrics(tmp_path / name)] for name in ("run", "whole")]
    assert moved[0] == moved[1], "the layers of the metric depend on the update, not on the process"
    rows = [row for row in metrics(tmp_path / "run") if "loss/total" in row]
    assert len(rows) == 5 and max(row["ledger/carried_tokens"] for row in rows) > 0 and rows[-1]["staleness/max"] > 0
    tokens = [row["response_length/mean"] for row in rows]
    # The last token of each sample.
    assert all(0 < row["routing/live"] < 1.5 / n for row, n in zip(rows, tokens, strict=True))
    assert max(row["routing/moved"] for row in rows) > 0, "the policy moves: some of its routers would choose otherwise"


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("byte", r"the experts of sample \d of prompt \d differ from the experts that its engine recorded"),
        (
            "router",
            r"layer 2 sent \d+ of \d+ tokens to other experts than the engine did; set rollout.routing_replay=false",
        ),
    ],
)
def test_a_wrong_expert_ends_the_run_in_one_line_before_the_policy_changes(
    inputs: Path, tmp_path: Path, fault: str, problem: str
) -> None:
    arguments = [str(inputs), f"--set=run_dir={tmp_path / 'run'}", "--set=layout={dp: 1}"]
    script = [sys.executable, str(Path(__file__).with_name("spoiled_routes.py")), fault, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert ended.returncode == 2, ended.stderr
    (error,) = [line for line in ended.stderr.splitlines() if "error" in line.lower()]
    assert re.search(problem, error), error
    assert "Traceback" not in ended.stderr
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not any("loss/total" in row for row in told)
