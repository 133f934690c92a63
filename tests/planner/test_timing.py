"""Times of the plan that depend on what a model trains and on the kind of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.shapes import LLAMA_70B
from tests.planner.test_plan import QWEN2_HALF_B, QWEN3_30B_A3B, MakeConfig, make_config, plan_of

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


@dataclass(frozen=True)
class ByHand:
    """A model on 64 H100s, and the numbers that its roofline needs."""

    fields: dict[str, Any]
    layout: dict[str, Any]
    layer: int  # weights that multiply a token in a layer
    q: int  # elements of a layer's queries, and of its attention's outputs
    output: int  # weights of the output layer
    engine_weights: int  # weights on a rank of an engine
    cache: int  # bytes per token on a rank of an engine
    bubble: float  # share of time


DENSE = ByHand(
    LLAMA_70B,
    {"layout.pp": 4, "layout.dp": 4, "rollout.tp": 8},
    layer=8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672,
    q=8192,
    output=8192 * 128256,
    engine_weights=(70_553_706_496 - 161 * 8192) // 8 + 161 * 8192,  # every rank has all norms
    cache=80 * 1 * 2 * 128 * 2,
    bubble=3 / (3 + 30),  # 3,670,016 tokens / 4 mini-batches / (4 replicas x 95% of 8,192) = 29.5 micro-batches
)
MIXTURE = ByHand(
    QWEN3_30B_A3B,
    {"layout.pp": 1, "layout.dp": 16, "layout.ep": 4, "rollout.tp": 4},
    layer=2048 * (4096 + 2 * 512) + 4096 * 2048 + 2048 * 128 + 8 * 3 * 2048 * 768,
    q=4096,
    output=2048 * 151936,
    engine_weights=(
        2 * 2048 * 151936 // 4
        + 48 * (2048 * (4096 + 2 * 512) + 4096 * 2048 + 128 * 3 * 2048 * 768) // 4
        + 48 * (2048 * 128 + 2 * 2048 + 2 * 128)  # router and norms, whole on every rank
        + 2048
    ),
    cache=48 * 1 * 2 * 128 * 2,
    bubble=0,
)


@pytest.mark.parametrize("case", [DENSE, MIXTURE], ids=["dense", "moe"])
def test_the_seconds_of_a_phase_equal_arithmetic_by_hand(make_config: MakeConfig, case: ByHand) -> None:
    changes = {"model.recompute": "none", "rollout.max_concurrent": 64}
    plan = plan_of(make_config(case.fields, **changes, **case.layout))
    found = {phase.label: phase for phase in plan.timing.phases}
    num_layers, tp = case.fields["num_hidden_layers"], case.layout["rollout.tp"]
    samples, prompt, response = 64 * 32, 256, 1536  # mean lengths are a quarter and a half of the longest
    tokens = samples * (prompt + response)
    pairs = tokens * (prompt + response) / 2
    weights = num_layers * case.layer
    flops = 2 * weights * tokens + 4 * case.q * num_layers * pairs + 2 * case.output * samples * response
    forward = flops / (64 * 989e12 * 0.41) / (1 - case.bubble)
    assert found["update"] == pytest.approx(3 * forward)
    assert found["log-probs"] == pytest.approx(2 * forward)  # policy and reference
    weights_and_state = plan.largest_state.weights + plan.largest_state.largest_optimizer
    moved = 2 * weights_and_state + 3 * plan.largest_state.weights  # the reference's weights come and go
    assert found["offload and onload"] == pytest.approx(moved / (50e9 * 0.75))
    assert found["sync"] == pytest.approx(2 * case.engine_weights / (50e9 * 0.75))
    token = 2 * (weights + case.output) / (tp * 989e12 * 0.5)

    def step(concurrent: int) -> float:
        exchanged = 2 * concurrent * case.fields["hidden_size"] * 2 * (tp - 1) / tp / (450e9 * 0.75)
        read = 2 * case.engine_weights + concurrent * (prompt + response / 2) * case.cache
        layers = num_layers * (65e-6 + 2 * (8e-6 + exchanged))
        return 2.5e-3 + layers + read / (3.35e12 * 0.95) + concurrent * token

    per_engine = samples * tp // 64
    sampling = per_engine / 32 * prompt * token + per_engine / 64 * response * step(64) + (3072 - response) * step(1)
    assert found["sampling"] == pytest.approx(sampling)
    assert plan.timing.step == pytest.approx(sum(found.values()))
    assert plan.timing.tokens_per_second_per_gpu == pytest.approx(tokens / plan.timing.step / 64)


def test_an_adapter_computes_no_weight_gradients_of_its_base(make_config: MakeConfig) -> None:
    config = {"layout.pp": 1, "layout.dp": 1, "layout.tp": 8, "model.recompute": "none"}
    usual, adapted = (plan_of(make_config(**config, **more)) for more in ({}, {"model.lora": {"rank": 16}}))
    times = [{one.label: float(one) for one in plan.timing.phases} for plan in (usual, adapted)]
    # Two products per weight instead of three; attention, communication and overheads stay.
    assert 2 / 3 < times[1]["update"] / times[0]["update"] < 0.75
    assert times[1]["sync"] < times[0]["sync"] / 10  # the first rank of an engine gets A and B whole
    received = [plan.sync_traffic.moved + plan.sync_traffic.same_rank for plan in (adapted, usual)]
    assert received[0] < received[1] / 100


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
        times = [{one.label: float(one) for one in plan.timing.phases}["update"] for plan in (short, long)]
        return times[1] - times[0]

    sparse, dense = (added(HYBRID | {"layer_types": [FULL, *[LINEAR] * (n - 1)] * (24 // n)}) for n in (4, 2))
    assert sparse > 0 and dense == pytest.approx(2 * sparse, rel=1e-2)
    usual = added(QWEN2_HALF_B)
    windowed = added(QWEN2_HALF_B | {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 12})
    assert windowed == pytest.approx(usual / 2, rel=0.05)
