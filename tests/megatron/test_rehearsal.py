"""The plan's formulas for Megatron's local layers, against real Megatron on ranks of many layouts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.checks.machine import card_of
from grpo_mega.cli.commands.options import PlanOptions
from grpo_mega.cli.commands.plan import prepare_plan
from grpo_mega.cli.planner.job import PlannedJob
from grpo_mega.weights.layout import megatron_layout_problems
from grpo_mega.weights.spec import ModelShape
from tests.helpers.rehearsal import Comparison, default_ranks, rehearse, request_of

pytestmark = pytest.mark.pool

FIELDS = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1003,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "hidden_act": "silu",
}
LAYOUTS = (
    "tp=1,dp=4",
    "tp=2,dp=2",
    "tp=2,dp=2,sequence_parallel=true",
    "tp=4,dp=8,sequence_parallel=true",
    "pp=2,dp=2",
    "pp=4,dp=2",
    "pp=4,vpp=2",
    "pp=2,vpp=2,tp=2,sequence_parallel=true",
    "tp=2,pp=2,dp=2",
    "tp=2,pp=2,dp=2,sequence_parallel=true model.recompute=selective",
    "tp=2,pp=4,dp=2,sequence_parallel=true model.recompute=full",
    "tp=4,pp=2,dp=2,sequence_parallel=true,order=tp-pp-dp",
    "tp=1,dp=2 model.recompute=full",
    "pp=2,dp=2 model.recompute=full model.recompute_num_layers=1",
    "pp=2,vpp=2 model.recompute=full model.recompute_num_layers=1",
    "tp=1,dp=2 model.recompute=selective model.recompute_modules=[mlp]",
    "tp=2,dp=2,sequence_parallel=true model.recompute=selective model.recompute_modules=[core_attn]",
    "tp=2,dp=4,sequence_parallel=true model.dtype=float32",
    "pp=2,dp=2,overlap_grad_reduce=true,overlap_param_gather=true",
    "cp=2,dp=1",
    "cp=4,dp=2 model.recompute=full",
    "cp=2,tp=2,dp=2,sequence_parallel=true model.recompute=selective",
    "cp=2,pp=2,dp=2",
    "cp=2,pp=2,vpp=2,tp=2,sequence_parallel=true model.dtype=float32",
)


MOE_FIELDS = FIELDS | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "hidden_size": 136,
    "moe_intermediate_size": 88,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MOE_LAYOUTS = (
    "tp=1,dp=2",
    "tp=1,dp=2,ep=2",
    "tp=2,dp=2,ep=2,sequence_parallel=true",
    "tp=2,dp=4,ep=2,sequence_parallel=true model.recompute=selective",
    "pp=2,dp=1",
    "tp=2,pp=2,dp=6,ep=3,sequence_parallel=true model.recompute=full",
    "pp=3,vpp=2,dp=2,ep=2 model.dtype=float32",
    "tp=2,cp=2,dp=3,ep=6,sequence_parallel=true model.recompute=selective",
)


LATENT_FIELDS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 5,
    "hidden_size": 136,
    "intermediate_size": 392,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 72,
    "kv_lora_rank": 56,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 10,
    "v_head_dim": 22,
    "moe_intermediate_size": 88,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1003,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LATENT_LAYOUTS = (
    "tp=1,dp=2",
    "tp=2,dp=4,ep=2,sequence_parallel=true model.recompute=selective",
    "pp=2,dp=2,ep=2 model.dtype=float32",
    "tp=2,pp=2,dp=6,ep=3,sequence_parallel=true model.recompute=full",
    "tp=2,cp=3,dp=2,ep=2,sequence_parallel=true",
)


HYBRID_FIELDS = LATENT_FIELDS | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 20,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 72,
}
HYBRID_LAYOUTS = (
    "tp=2,dp=4,ep=2,sequence_parallel=true model.recompute=selective",
    "pp=2,dp=2,ep=2 model.dtype=float32",
    "pp=3,vpp=2,dp=2,ep=2 model.recompute=full",
)


def setup_of(text: str, fields: dict[str, Any] = FIELDS) -> PlannedJob:
    layout, *rest = text.split(" ")
    raw = {
        "run_dir": "unused",
        "steps": 1,
        "model": {"path": "unused", "dtype": "bfloat16"},
        "data": {"train": "unused", "max_prompt_length": 128},
        "rollout": {"max_response_length": 512},
        "batch": {"tokens_per_micro_batch": 2048},
    }
    for override in [*(f"layout.{part}" for part in layout.split(",")), *rest]:
        configs.apply_override(raw, override)
    config = configs.validate(raw)
    shape, chosen = ModelShape.from_hf_config(fields), fields.get("num_experts_per_tok", 0)
    return PlannedJob(config, shape, chosen, card_of("h100"), config.layout.world_size, 8, 64.0, 256.0)


ALL_LAYOUTS = {text: (text, FIELDS) for text in LAYOUTS}
ALL_LAYOUTS |= {f"moe {text}": (text, MOE_FIELDS) for text in MOE_LAYOUTS}
ALL_LAYOUTS |= {f"latent {text}": (text, LATENT_FIELDS) for text in LATENT_LAYOUTS}
ALL_LAYOUTS |= {f"hybrid {text}": (text, HYBRID_FIELDS) for text in HYBRID_LAYOUTS}
SWEEP = (  # they repeat parts of other cases
    "tp=2,dp=2",
    "tp=4,dp=8,sequence_parallel=true",
    "pp=2,dp=2",
    "pp=4,dp=2",
    "tp=2,pp=2,dp=2",
    "tp=4,pp=2,dp=2,sequence_parallel=true,order=tp-pp-dp",
    "tp=1,dp=2 model.recompute=full",
    "moe tp=1,dp=2",
    "moe pp=2,dp=1",
    "cp=2,pp=2,dp=2",
    "tp=1,dp=4",
    "pp=4,vpp=2",
    "cp=2,dp=1",
    "moe tp=1,dp=2,ep=2",
    "moe tp=2,dp=2,ep=2,sequence_parallel=true",
    "pp=2,dp=2 model.recompute=full model.recompute_num_layers=1",
    "latent tp=2,dp=4,ep=2,sequence_parallel=true model.recompute=selective",
    "tp=2,pp=4,dp=2,sequence_parallel=true model.recompute=full",
    "cp=4,dp=2 model.recompute=full",
    "cp=2,pp=2,vpp=2,tp=2,sequence_parallel=true model.dtype=float32",
    "latent tp=1,dp=2",
    "hybrid pp=2,dp=2,ep=2 model.dtype=float32",
)
FULL = (
    "tp=2,dp=2,sequence_parallel=true",
    "tp=2,dp=4,sequence_parallel=true model.dtype=float32",
    "cp=2,tp=2,dp=2,sequence_parallel=true model.recompute=selective",
    "latent tp=2,pp=2,dp=6,ep=3,sequence_parallel=true model.recompute=full",
    "tp=2,dp=2,sequence_parallel=true model.recompute=selective model.recompute_modules=[core_attn]",
    "hybrid pp=3,vpp=2,dp=2,ep=2 model.recompute=full",
    "pp=2,vpp=2 model.recompute=full model.recompute_num_layers=1",
    "tp=1,dp=2 model.recompute=selective model.recompute_modules=[mlp]",
    "pp=2,dp=2,overlap_grad_reduce=true,overlap_param_gather=true",
    "moe pp=3,vpp=2,dp=2,ep=2 model.dtype=float32",
    "moe tp=2,cp=2,dp=3,ep=6,sequence_parallel=true model.recompute=selective",
    "latent pp=2,dp=2,ep=2 model.dtype=float32",
    "latent tp=2,cp=3,dp=2,ep=2,sequence_parallel=true",
)


@pytest.fixture(scope="module")
def rehearsed(request: pytest.FixtureRequest) -> dict[str, list[Comparison]]:
    """Rehearse the layouts of the selected tests."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["text"] for item in items if "text" in getattr(item, "fixturenames", ())]
    models = [ALL_LAYOUTS[name] for name in names]
    cases = [(setup := setup_of(text, fields), default_ranks(setup), fields) for text, fields in models]
    return dict(zip(names, rehearse(cases), strict=True))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, marks=[pytest.mark.sweep] * (text in SWEEP) + [pytest.mark.full] * (text in FULL))
        for text in ALL_LAYOUTS
    ],
)
def test_the_plan_agrees_with_real_megatron(rehearsed: dict[str, list[Comparison]], text: str) -> None:
    wrong = [c for c in rehearsed[text] if not c.agrees]
    assert not wrong, wrong
    exact = [c for c in rehearsed[text] if c.label in ("parameters", "weights", "gradients")]
    assert exact and all(c.planned == c.rehearsed for c in exact)
    assert all(c.rehearsed > 0 for c in rehearsed[text])


def test_layers_in_bf16_keep_the_planned_bytes_within_two_percent(rehearsed: dict[str, list[Comparison]]) -> None:
    """With float32 (it saves views of other tensors), full recompute of such small layers, or linear attention the
    bound is ten percent.
    """
    others = ("float32", "recompute=full", "hybrid")
    chosen = [text for text in rehearsed if not any(other in text for other in others)]
    kept = [c for text in chosen for c in rehearsed[text] if c.label == "activations kept"]
    assert {text for text in chosen if text.startswith("moe")} and len(kept) > 4
    assert all(c.difference < 0.02 for c in kept)


START = """
import json, sys
import torch.distributed as dist
from tests.helpers import rehearsal
rehearsal.send_nothing()
from grpo_mega.megatron import runtime
for line in sys.stdin:
    request = json.loads(line)
    dist.init_process_group("fake", store=dist.HashStore(), rank=request["rank"], world_size=request["world_size"])
    try:
        rehearsal.run_rank(request)
        print("starts", flush=True)
    except Exception as error:
        print(repr(error), flush=True)
    runtime.stop()
"""


@pytest.mark.full
def test_training_starts_at_the_legal_tensor_parallel_sizes_only() -> None:
    """Ask Megatron, as the last rank. If there are fewer key-value heads than ranks, head_dim matters."""
    cases = [
        (heads, kv, dim, tp) for heads, kv, dim in ((6, 2, 8), (6, 2, 12), (12, 4, 10)) for tp in range(1, heads + 1)
    ]
    lines, legal = [], []
    for heads, kv, dim, tp in cases:
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim, "num_hidden_layers": 1}
        fields = FIELDS | sizes | {"hidden_size": 44, "intermediate_size": 660}
        setup = setup_of(f"tp={tp}")
        request = {"config": setup.config.model_dump(mode="json"), "model": fields, "rank": tp - 1, "world_size": tp}
        lines.append(json.dumps(request | {"num_batches": 1, "num_tokens": 32, "segment": 16}))
        legal.append(not list(megatron_layout_problems(ModelShape.from_hf_config(fields), setup.layout)))
    result = subprocess.run(
        [sys.executable, "-c", START], input="\n".join(lines), capture_output=True, text=True, timeout=900
    )
    # A slow machine prints progress, too.
    found = [line for line in result.stdout.splitlines() if line == "starts" or "Error(" in line]
    assert len(found) == len(cases), result.stderr
    assert [line == "starts" for line in found] == legal, list(zip(cases, found, strict=True))
    assert dict(zip(cases, legal, strict=True))[6, 2, 12, 6] and not dict(zip(cases, legal, strict=True))[6, 2, 8, 6]


def test_a_model_that_is_not_here_is_asked_for_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"{{run_dir: {tmp_path}/run, steps: 1, model: {{path: none}}, data: {{train: none}}}}"
    )
    _, violations = prepare_plan(PlanOptions(tmp_path / "run.yaml"))
    assert any(
        "--model NAME" in violation and "--model-config FILE" in violation for violation in violations.violations
    )


def test_trainer_ranks_alone_are_rehearsed() -> None:
    layout = "tp=4,pp=4,dp=3,engine_ranks=16,sequence_parallel=true"
    setup = setup_of(f"{layout} rollout.placement=separate rollout.engine=sglang rollout.tp=8")
    assert default_ranks(setup) == [0, 24, 36]
    request = request_of(setup, 47, {})
    assert request["world_size"] == configs.validate(request["config"]).layout.world_size == 48
