"""A plan with a teacher: its memory by hand, and one more pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.checks.machine import card_of
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.cli.planner.plan import Plan
from grpo_mega.weights.spec import ModelShape
from tests.helpers.shapes import LLAMA_70B

EXACT = {"recipe": "opd", "distill_kl": "reverse"}


def test_a_teachers_memory_equals_arithmetic_by_hand() -> None:
    """Eight layers of Llama 70B in bf16, over tp=4 and pp=4, are on the device only for log-probs."""
    raw = {
        "run_dir": "runs/70b",
        "steps": 1,
        "model": {"path": "unused", "dtype": "bfloat16", "recompute": "selective"},
        "layout": {"tp": 4, "pp": 4, "dp": 4, "sequence_parallel": True, "layers_per_chunk": [17, 21, 21, 21]},
        "data": {"train": "unused", "max_prompt_length": 1024},
        "rollout": {"engine": "sglang", "tp": 8, "max_response_length": 3072},
    }
    shape = ModelShape.from_hf_config(LLAMA_70B)
    setup = PlannedJob(configs.validate(raw), shape, 0, card_of("h100"), 64, 8, 512.0, 1024.0)
    alone, plan = Plan(setup), Plan(replace(setup, teachers=((replace(shape, num_layers=8), 0),)))
    embedding = 128256 * 8192
    layer = (70_553_706_496 - 2 * embedding - 8192) / 80
    first = (2 * layer + embedding) / 4
    (taught,) = [figure for figure in plan.stages[0].phases["log-probs"] if figure.label == "teacher"]
    assert taught == pytest.approx(2 * first, rel=1e-4)
    assert plan.host.pinned_total - alone.host.pinned_total == pytest.approx(8 * 2 * first, rel=1e-4)
    exact = replace(setup, config=configs.validate(raw | {"teachers": {"a": {"path": "x"}}, "algorithm": EXACT}))
    exact_plan = Plan(replace(exact, teachers=((replace(shape, num_layers=8), 0),)))
    (hidden,) = [figure for figure in exact_plan.host.other if figure.label == "teacher's hidden states"]
    assert hidden == 8 * (32 * 16 / 4 * 1024) * 8192 * 2  # 8 ranks of the last stage on a node
    update = exact_plan.stages[3].phases["update"]
    (head,) = [figure for figure in update if figure.label == "teachers' output layers"]
    assert head == 2 * embedding / 4
    assert plan.stages[0].totals["update"] == alone.stages[0].totals["update"]
    seconds = [next(f for f in p.timing.phases if f.label == "log-probs") for p in (alone, plan)]
    assert seconds[0] == 0 and 0.3 < seconds[1] < 1
