"""FP8 blocks have the oracle's bits; the tensors and layouts that support them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_mega.cli.checks.precision import rollout_block_problems
from grpo_mega.config import LayoutConfig, RolloutConfig
from grpo_mega.errors import ConfigError, WeightMappingError, raise_all
from grpo_mega.rollout.sglang.requirements import served_card_problems
from grpo_mega.weights import apply as blockwise_fp8
from grpo_mega.weights.families import FAMILIES, family_of
from grpo_mega.weights.layout import EngineLayout, MegatronLayout, engine_shards, megatron_shards
from grpo_mega.weights.plan import plan_transfers
from grpo_mega.weights.spec import ModelShape
from tests.oracles import fp8_blocks as oracle

DTYPES = (torch.bfloat16, torch.float32)
LLAMA_70B = ModelShape("llama", 80, 8192, 28672, 64, 8, 128, 128256, tied=False)
QWEN_72B = replace(LLAMA_70B, model_type="qwen2", ffn=29568)
EXPERTS = {"num_experts": 8, "moe_ffn": 128, "num_dense": 1, "shared_ffn": 1024}
EXPERTS |= {"kv_lora": 64, "rope_dim": 64, "v_dim": 128}
GLM_AIR = ModelShape("glm4_moe", 46, 4096, 10944, 96, 8, 128, 151552, tied=False, num_experts=128, moe_ffn=1408)
GLM_AIR = replace(GLM_AIR, num_dense=1, shared_ffn=1408)
QWEN_SMALL = ModelShape("qwen2", 24, 896, 4864, 14, 2, 64, 151936, tied=True)


def weight_of(rows: int, cols: int, dtype: torch.dtype, magnitude: float, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, cols, generator=random, dtype=torch.float64) * magnitude).to(dtype)


def as_bits(values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.view(torch.uint8), scales.view(torch.int32)


def assert_equals_twin(weight: torch.Tensor) -> None:
    found, expected = blockwise_fp8.quantise(weight), oracle.quantise(weight)
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert all(torch.equal(a, b) for a, b in zip(as_bits(*found), as_bits(*expected), strict=True))
    for dtype in DTYPES:
        ours, theirs = blockwise_fp8.dequantise(*found, dtype), oracle.dequantise(*expected, dtype)
        assert ours.dtype == dtype
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from(DTYPES),
    st.sampled_from([1e-45, 1e-40, 1e-36, 5e-36, 1e-20, 1e-4, 0.02, 1.0, 300.0, 1e30, 2e37]),
    st.integers(0, 9),
)
def test_any_shape_and_magnitude_gives_the_bits_of_the_naive_twin(
    rows: int, cols: int, dtype: torch.dtype, magnitude: float, seed: int
) -> None:
    assert_equals_twin(weight_of(rows, cols, dtype, magnitude, seed))


def test_a_tensor_of_several_steps_gives_the_bits_of_the_naive_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise_fp8, "_ELEMENTS_AT_ONCE", {"cpu": 300 * 256})
    assert_equals_twin(weight_of(900, 300, torch.bfloat16, 0.02))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_zeros_stay_zero_and_nonfinite_blocks_become_nan(dtype: torch.dtype) -> None:
    weight = weight_of(384, 256, dtype, 0.02)
    weight[:128, :128] = 0
    weight[130, 7], weight[300, 200] = torch.nan, torch.inf
    assert_equals_twin(weight)
    values, scales = blockwise_fp8.quantise(weight)
    assert not values[:128, :128].view(torch.uint8).any()
    assert scales[0, 0] == 1
    assert scales.isnan().nonzero().tolist() == [[1, 0], [2, 1]]
    found = blockwise_fp8.dequantise(values, scales, torch.float32)
    assert found.isnan().view(3, 128, 2, 128).any(3).any(1).nonzero().tolist() == [[1, 0], [2, 1]]


def test_all_e4m3_values_and_ties_round_like_the_twins() -> None:
    steps = torch.arange(128 * 128).reshape(128, 128) / 16384 * 448  # every range of e4m3, and its ties, with scale 1
    steps[0, 0] = 448.0
    assert_equals_twin(steps)
    assert float(blockwise_fp8.quantise(steps)[1]) == 1.0


@pytest.mark.parametrize("magnitude", [1e-6, 0.02, 50.0])
def test_dequantized_blocks_are_within_a_sixteenth_of_each_weight(magnitude: float) -> None:
    weight = weight_of(256, 384, torch.float32, magnitude)
    found = blockwise_fp8.dequantise(*blockwise_fp8.quantise(weight), torch.float32)
    amax = weight.abs().max()
    assert ((found - weight).abs() <= weight.abs() / 15.9 + amax * 2**-17).all()
    assert float((found - weight).norm() / weight.norm()) < 0.03


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2), st.integers(0, 2), st.integers(1, 3), st.integers(1, 3))
def test_a_slice_that_is_cut_between_blocks_gives_the_slice_of_the_whole(i: int, j: int, rows: int, cols: int) -> None:
    weight = weight_of(600, 500, torch.bfloat16, 0.02)
    values, scales = blockwise_fp8.quantise(weight)
    place = slice(128 * i, 128 * (i + rows)), slice(128 * j, 128 * (j + cols))
    found = blockwise_fp8.quantise(weight[place])
    blocks = scales[i : i + rows, j : j + cols]
    assert all(torch.equal(a, b) for a, b in zip(as_bits(*found), as_bits(values[place], blocks), strict=True))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_only_linear_layers_of_attention_and_mlp_are_quantized(model_type: str) -> None:
    """Check the last words of their names, which the table does not use."""
    shapes = (replace(LLAMA_70B, model_type=model_type, ffn=1024, q_lora=width, **EXPERTS) for width in (0, 64))
    found = frozenset().union(*(family_of(model_type).linear_tensors(shape) for shape in shapes))
    ends = {name.removesuffix(".weight").rpartition(".")[2] for name in found}
    latent = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"}
    has_latents = "deepseek" in model_type or model_type == "glm4_moe_lite"
    attention = latent | {"q_proj", "o_proj"} if has_latents else {f"{x}_proj" for x in "qkvo"}
    assert ends == attention | (
        {"w1", "w2", "w3"} if model_type == "mixtral" else {"gate_proj", "up_proj", "down_proj"}
    )
    assert all(name.endswith(".weight") for name in found)


def test_rows_that_ranks_cannot_split_into_blocks_stay_in_bf16_by_name() -> None:
    """A name must not match others: `mlp.gate` is the router, and `mlp.gate_proj` is not."""
    family, projections = family_of("glm4_moe"), ("gate_proj", "up_proj", "down_proj")
    plain = family.plain_modules(GLM_AIR)
    assert plain[:3] == [f"model.layers.0.mlp.{name}" for name in projections]
    assert set(plain[3:]) == {
        f"model.layers.{i}.mlp.shared_experts.{name}" for i in range(1, 46) for name in projections
    }
    quantised = {name.removesuffix(".weight") for name in family.linear_tensors(GLM_AIR)}
    assert {f"model.layers.{{i}}.mlp.experts.{{e}}.{name}" for name in projections} < quantised
    assert not quantised & {
        f"model.layers.{{i}}.mlp.{block}{n}" for block in ("", "shared_experts.") for n in projections
    }
    assert family.plain_modules(replace(GLM_AIR, ffn=12288, shared_ffn=2048)) == []
    assert family_of("qwen2").plain_modules(QWEN_72B) == []


def test_experts_of_11_blocks_are_spread_over_the_ranks_of_an_engine() -> None:
    [problem] = problems_of(GLM_AIR, 1, 8)
    assert "model.layers.{i}.mlp.experts.{e}.up_proj.weight" in problem and "row 176" in problem
    assert problem.endswith("use rollout.ep=8, or leave rollout.quantization out")
    assert problems_of(GLM_AIR, 1, 8, engine_ep=8) == []


def problems_of(
    shape: ModelShape, tp: int, engine_tp: int = 1, engine: str = "sglang", engine_ep: int = 1
) -> list[str]:
    sizes = {"tp": engine_tp, "ep": engine_ep}
    rollout = RolloutConfig.model_validate({"engine": engine, "quantization": "fp8", **sizes})
    return list(rollout_block_problems(rollout, LayoutConfig(tp=tp), shape))


def test_layouts_that_cut_between_blocks_are_taken() -> None:
    assert problems_of(LLAMA_70B, 8, 8) == []
    assert problems_of(QWEN_72B, 1, 1) == []
    assert list(rollout_block_problems(RolloutConfig(), LayoutConfig(tp=2), QWEN_72B)) == []


@pytest.mark.parametrize(
    ("shape", "tp", "engine_tp", "engine", "message"),
    [
        (
            QWEN_72B,
            2,
            1,
            "sglang",
            (
                "layout.tp=2 cuts model.layers.{i}.mlp.gate_proj.weight at row 14784 of 29568 (blocks of 128: 231),"
                " inside a block of rollout.quantization='fp8'; use layout.tp=1, or leave rollout.quantization out"
            ),
        ),
        (
            QWEN_72B,
            1,
            8,
            "sglang",
            "rollout.tp=8 cuts fused layers so that model.layers.{i}.mlp.up_proj.weight starts at row 3",
        ),
        (
            QWEN_SMALL,
            1,
            1,
            "embedded",
            (
                "layout.tp=1 cuts model.layers.{i}.self_attn.q_proj.weight at row 448 of 896 (blocks of 128: 7), inside"
                " a block of rollout.quantization='fp8'; leave rollout.quantization out"
            ),
        ),
        (
            replace(LLAMA_70B, ffn=300),
            1,
            1,
            "sglang",
            (
                "rollout.tp=1 cuts fused layers so that model.layers.{i}.mlp.up_proj.weight starts at row 300, inside a"
                " block"
            ),
        ),
    ],
)
def test_a_layout_that_cuts_a_block_is_refused_in_one_line_with_the_remedy(
    shape: ModelShape, tp: int, engine_tp: int, engine: str, message: str
) -> None:
    [found] = problems_of(shape, tp, engine_tp, engine)
    assert message in found


def test_the_last_block_may_be_smaller_where_nothing_is_fused_behind_it() -> None:
    assert problems_of(replace(LLAMA_70B, ffn=300), 1, engine="embedded") == []


@pytest.mark.parametrize("shape", [QWEN_72B, QWEN_SMALL])
def test_refused_layouts_cannot_be_planned_either(shape: ModelShape) -> None:
    family = family_of(shape.model_type)
    trainer, engines = megatron_shards(family, shape, MegatronLayout(tp=2)), EngineLayout(2, 1)
    plan_transfers(trainer, engine_shards(family, shape, engines, 2), ranks_per_node=2)
    with pytest.raises(WeightMappingError, match="block of 128"):
        plan_transfers(trainer, engine_shards(family, shape, engines, 2, quantise=True), ranks_per_node=2)


@pytest.mark.parametrize(
    ("dtype", "capability", "message"),
    [
        ("bfloat16", (8, 0), "needs an L40, H100, H200 or later, found A100"),
        ("float32", (9, 0), "needs rollout.dtype=bfloat16"),
    ],
)
def test_a_server_on_a_gpu_that_cannot_hold_blocks_is_refused(
    dtype: str, capability: tuple[int, int], message: str
) -> None:
    rollout = RolloutConfig(engine="sglang", quantization="fp8")
    with pytest.raises(ConfigError, match=message):
        raise_all(served_card_problems(rollout, dtype, capability, "A100"))
    assert not list(served_card_problems(RolloutConfig(), dtype, capability, "A100"))
    assert not list(served_card_problems(rollout, "bfloat16", (9, 0), "H100"))


def test_the_plan_of_a_large_model_moves_about_half_the_bytes() -> None:
    family, layout, engines = family_of("llama"), MegatronLayout(tp=4, pp=4, dp=4), EngineLayout(8, 8)
    trainer = megatron_shards(family, LLAMA_70B, layout)
    plain, quantised = (
        plan_transfers(trainer, engine_shards(family, LLAMA_70B, engines, 64, quantise=on), ranks_per_node=8)
        for on in (False, True)
    )
    ratio = quantised.traffic(2).moved / plain.traffic(2).moved
    assert 0.5 < ratio < 0.52, ratio
    assert 0.5 < len(quantised.rounds(256 << 20, 2)) / len(plain.rounds(256 << 20, 2)) < 0.6
