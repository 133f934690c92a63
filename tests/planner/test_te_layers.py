"""The plan's activations with Transformer Engine against the tensors that its real Python saves, on fake tensors.

One process measures all cases. One layer is the difference between three layers and two. Then come whole ranks of
layouts in slurm/.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.checks.machine import ASSUMED, card_of
from grpo_mega.cli.commands.options import PlanOptions
from grpo_mega.cli.commands.plan import prepare_plan
from grpo_mega.cli.planner.activations import activations
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.weights.spec import ModelShape
from tests.helpers.shapes import LLAMA_70B
from tests.te_on_cpu.emulated_te import launcher

pytestmark = pytest.mark.pool

# 2026-11-22, Transformer Engine 2.11.0, Megatron-core 0.16.1: MiB of a layer of Llama-3-70B on a rank of TP4 with
# sequence parallelism, 16,384 tokens. Selective: 2026-11-26, without attention's core.
MEASURED = {
    ("bf16", "none"): 1073.03,
    ("bf16", "selective"): 337.02,
    ("bf16", "full"): 64.0,
    ("delayed", "none"): 929.03,
    ("delayed", "selective"): 337.02,
    ("tensorwise", "none"): 897.03,
    ("tensorwise", "selective"): 305.02,
    ("tensorwise", "full"): 64.0,
    ("blockwise", "none"): 902.53,
    ("blockwise", "selective"): 306.02,
}
ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_reference": True},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
SMALL: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 2816,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 80,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1003,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}
QWEN2, QWEN3 = SMALL | {"model_type": "qwen2"}, SMALL | {"model_type": "qwen3"}
EXPERTS = {"moe_intermediate_size": 352, "num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": []}
QWEN3_MOE = SMALL | EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True, "decoder_sparse_step": 1}
SHARED_EXPERTS = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 352,
    "n_group": 1,
    "topk_group": 1,
}
GLM = SMALL | SHARED_EXPERTS | {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True}
DEEPSEEK = SMALL | SHARED_EXPERTS | {"model_type": "deepseek_v3", "num_key_value_heads": 12, "head_dim": 64}
DEEPSEEK |= {"kv_lora_rank": 128, "q_lora_rank": 96, "qk_nope_head_dim": 48, "qk_rope_head_dim": 64, "v_head_dim": 80}


@dataclass(frozen=True)
class Layer:
    """A layer of a model on a rank."""

    name: str
    fields: dict[str, Any]
    recipe: str
    recompute: str
    layout: dict[str, Any]
    tokens: int
    model: dict[str, Any] = field(default_factory=dict)

    def setup(self, num_layers: int) -> PlannedJob:
        raw = {
            "run_dir": "unused",
            "steps": 1,
            "model": {"path": "unused", "dtype": "bfloat16", "recompute": self.recompute} | self.model,
            "precision": PRECISIONS[self.recipe],
            "layout": self.layout,
            "data": {"train": "unused", "max_prompt_length": 128},
            "rollout": {"max_response_length": 512},
            "batch": {"tokens_per_micro_batch": self.tokens},
        }
        config, shape = (
            configs.validate(raw),
            ModelShape.from_hf_config(self.fields | {"num_hidden_layers": num_layers}),
        )
        chosen, assumed = self.fields.get("num_experts_per_tok", 0), replace(ASSUMED, expert_imbalance=1.0)
        return PlannedJob(
            config, shape, chosen, card_of("h100"), config.layout.world_size, 8, 64.0, 256.0, assumed=assumed
        )

    def request(self, num_layers: int) -> dict[str, Any]:
        from tests.helpers.rehearsal import request_of  # imports Megatron

        return request_of(self.setup(num_layers), 0, self.fields | {"num_hidden_layers": num_layers}) | {
            "num_batches": 1
        }

    def planned(self) -> float:
        """Return the bytes of one layer by the plan's formula, without recomputed tensors."""
        more, fewer = (float(activations(self.setup(n), 0).saved) for n in (3, 2))
        return more - fewer


TABLE = [
    Layer("llama 70B", LLAMA_70B, recipe, recompute, {"tp": 4, "dp": 1, "sequence_parallel": True}, 16384)
    for recipe, recompute in MEASURED
]
OTHERS = [
    Layer(name, fields, recipe, recompute, layout, 2048)
    for name, fields, layout, recipes in (
        ("qwen3 TP2+SP", QWEN3, {"tp": 2, "dp": 1, "sequence_parallel": True}, ("bf16", "delayed")),
        ("qwen3 TP2", QWEN3, {"tp": 2, "dp": 1}, ("tensorwise",)),
        ("qwen2 TP1", QWEN2, {"tp": 1, "dp": 1}, ("blockwise",)),
        (
            "qwen3_moe TP2+SP EP2",
            QWEN3_MOE,
            {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
            ("bf16", "tensorwise"),
        ),
        ("qwen3_moe TP2+SP ETP2", QWEN3_MOE, {"tp": 2, "etp": 2, "dp": 1, "sequence_parallel": True}, ("bf16",)),
        ("glm4_moe TP2+SP EP2", GLM, {"tp": 2, "ep": 2, "dp": 1, "sequence_parallel": True}, ("bf16", "delayed")),
        (
            "deepseek_v3 TP2+SP EP2",
            DEEPSEEK,
            {"tp": 2, "ep": 2, "dp": 1, "sequence_parallel": True},
            ("bf16", "delayed", "tensorwise"),
        ),
        ("deepseek_v2", DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None}, {"dp": 1}, ("blockwise",)),
    )
    for recipe in recipes
    for recompute in ("none", "selective")
]
OTHERS += [
    Layer(name, fields, recipe, recompute, layout, 2048, model)
    for name, fields, layout, recipe, recompute, model in (
        ("qwen3 core", QWEN3, {"tp": 2, "dp": 1}, "bf16", "selective", {"recompute_modules": ["core_attn"]}),
        ("qwen3 both", QWEN3, {"tp": 2, "dp": 1}, "delayed", "selective", {"recompute_modules": ["core_attn", "mlp"]}),
        ("qwen3_moe core", QWEN3_MOE, {"dp": 2, "ep": 2}, "bf16", "selective", {"recompute_modules": ["core_attn"]}),
    )
]
SHARED = [
    Layer(
        "llama 70B",
        LLAMA_70B,
        recipe,
        recompute,
        {"tp": 4, "cp": cp, "dp": 1, "sequence_parallel": True},
        2048,
    )
    for cp, recipe, recompute in (
        (2, "bf16", "none"),
        (4, "bf16", "selective"),
        (4, "tensorwise", "none"),
        (2, "tensorwise", "full"),
    )
]
# The first stage of the FP8 layout has the most activations.
RANKS = [("llama3_70b", LLAMA_70B, (0,))]


def setup_of(name: str, fields: dict[str, Any], folder: Path) -> PlannedJob:
    (folder / "config.json").write_text(json.dumps(fields))
    setup, violations = prepare_plan(
        PlanOptions(ROOT / "slurm" / f"{name}.yaml", world_size=64, model_config=folder / "config.json")
    )
    assert setup is not None and not violations.violations
    return setup


def measure(requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    result = subprocess.run(
        launcher.command(launcher.DEFAULT, str(ROOT / "tests" / "te_on_cpu" / "rehearse.py")),
        input="".join(json.dumps(request) + "\n" for request in requests),
        env=launcher.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@dataclass(frozen=True)
class Measured:
    layers: list[tuple[Layer, float]]  # bytes that it keeps
    ranks: dict[tuple[str, int], tuple[float, float]]  # (config, rank): (planned, measured) bytes


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Measure every third layer of TABLE and OTHERS, with --sweep all of them."""
    if reason := launcher.why_not(launcher.DEFAULT):
        pytest.skip(reason)
    from tests.helpers.rehearsal import default_ranks, request_of  # imports Megatron

    step = 1 if request.config.getoption("--sweep") else 3
    chosen = [*TABLE[::step], *OTHERS[::step], *SHARED]
    layers = [layer.request(n) for layer in chosen for n in (2, 3)]
    folder = tmp_path_factory.mktemp("model")
    ranks, requests = [], []
    for name, fields, stages in RANKS:
        setup = setup_of(name, fields, folder)
        for rank in [default_ranks(setup)[stage] for stage in stages]:
            planned = sum(f for f in activations(setup, setup.layout.place(rank)[1]).kept)
            ranks.append((name, rank, planned))
            requests.append(request_of(setup, rank, fields))
    answers = measure([*layers, *requests])
    kept = [answer["kept"] for answer in answers]
    assert len(kept) == len(layers) + len(ranks)
    of_ranks = {
        (name, rank): (planned, found) for (name, rank, planned), found in zip(ranks, kept[len(layers) :], strict=True)
    }
    pairs = zip(kept[: len(layers) : 2], kept[1 : len(layers) : 2], strict=True)
    return Measured(list(zip(chosen, (more - fewer for fewer, more in pairs), strict=True)), of_ranks)


@pytest.mark.full
def test_the_dated_table_equals_a_new_measurement(measured: Measured) -> None:
    found = {(layer.recipe, layer.recompute): size / MIB for layer, size in measured.layers if layer in TABLE}
    assert found == pytest.approx({key: MEASURED[key] for key in found}, abs=0.02) and len(found) >= 4


def test_the_formulas_give_the_table() -> None:
    found = {(layer.recipe, layer.recompute): layer.planned() / MIB for layer in TABLE}
    assert found == pytest.approx(MEASURED, rel=1e-4)


@pytest.mark.full
def test_the_formulas_hold_for_other_models_and_layouts(measured: Measured) -> None:
    """Include norms of queries and keys, heads of an odd width, and sequences that are split or whole.

    The plan leaves out the row map of the fused permutation, which is below 0.2% of a layer with experts.
    """
    chosen = [(layer, size) for layer, size in measured.layers if layer in OTHERS]
    assert len(chosen) >= len(OTHERS) // 3
    for layer, size in chosen:
        assert layer.planned() == pytest.approx(size, rel=2e-3 if "num_experts_per_tok" in layer.fields else 1e-3), (
            layer
        )


@pytest.mark.full
def test_context_parallel_ranks_keep_the_planned_bytes(measured: Measured) -> None:
    chosen = [entry for entry in measured.layers if entry[0] in SHARED]
    assert len(chosen) == len(SHARED)
    for layer, size in chosen:
        assert layer.planned() == pytest.approx(size, rel=1e-3), layer


@pytest.mark.full
def test_a_whole_rank_of_the_70b_layout_keeps_the_planned_bytes(measured: Measured) -> None:
    """With a last layer in bf16, interleaved stages, and overlapped reductions."""
    assert measured.ranks
    for case, (planned, kept) in measured.ranks.items():
        assert planned == pytest.approx(kept, rel=0.02), case


def test_layers_in_mxfp8_keep_more_because_blocks_have_more_scales() -> None:
    tensorwise = next(layer for layer in TABLE if layer.recipe == "tensorwise").setup(2)
    mxfp8 = tensorwise.config.precision.model_copy(update={"fp8": "e4m3", "fp8_recipe": "mxfp8"})
    changed = replace(tensorwise, config=tensorwise.config.model_copy(update={"precision": mxfp8}))
    assert activations(changed, 0).saved > activations(tensorwise, 0).saved
