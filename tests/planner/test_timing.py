"""Times of the plan that depend on what a model trains and on the kind of its layers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.test_plan import QWEN2_HALF_B, MakeConfig, make_config, plan_of

__all__ = ["make_config"]  # a fixture

LONG = {
    "layout.tp": 1,
    "layout.pp": 1,
    "layout.dp": 8,
    "layout.sequence_parallel": False,
    "model.recompute": "none",
    "rollout.engine": "embedded",
    "rollout.tp": 1,
    "batch.tokens_per_micro_batch": 32768,
}
HYBRID = QWEN2_HALF_B | {"model_type": "qwen3_5_text", "hidden_size": 1024, "head_dim": 128, "rms_norm_eps": 1e-6}
HYBRID |= {"linear_num_key_heads": 8, "linear_num_value_heads": 16, "num_attention_heads": 8}
FULL, LINEAR = "full_attention", "linear_attention"


def test_an_adapter_computes_no_weight_gradients_of_its_base(make_config: MakeConfig) -> None:
    config = {"layout.pp": 1, "layout.dp": 1, "layout.tp": 8, "model.recompute": "none"}
    usual, adapted = (plan_of(make_config(**config, **more)) for more in ({}, {"model.lora": {"rank": 16}}))
    times = [{one.label: float(one.value) for one in plan.timing.phases} for plan in (usual, adapted)]
    # Two products per weight instead of three; attention, communication and overheads stay.
    assert 2 / 3 < times[1]["update"] / times[0]["update"] < 0.75
    assert times[1]["sync"] < times[0]["sync"] / 10  # the first rank of an engine gets A and B whole
    received = [plan.sync_traffic.moved + plan.sync_traffic.same_rank for plan in (adapted, usual)]
    assert received[0] < received[1] / 100
    assert float(adapted.timing.model_flops_share.value) < 1


def test_attention_costs_what_its_kind_of_layer_costs(make_config: MakeConfig) -> None:
    """With twice as long samples and half as many, only full attention takes longer."""

    def added(fields: dict[str, Any]) -> float:
        short, long = (
            plan_of(
                make_config(
                    fields,
                    **LONG,
                    **{
                        "data.max_prompt_length": n,
                        "rollout.max_response_length": n,
                        "batch.prompts_per_step": prompts,
                    },
                )
            )
            for n, prompts in ((4096, 128), (8192, 64))
        )
        times = [{one.label: float(one.value) for one in plan.timing.phases}["update"] for plan in (short, long)]
        return times[1] - times[0]

    sparse, dense = (added(HYBRID | {"layer_types": [FULL, *[LINEAR] * (n - 1)] * (24 // n)}) for n in (4, 2))
    assert sparse > 0 and dense == pytest.approx(2 * sparse, rel=1e-2)
    usual = added(QWEN2_HALF_B)
    windowed = added(QWEN2_HALF_B | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 12})
    assert windowed == pytest.approx(usual / 2, rel=0.05)
