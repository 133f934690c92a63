"""Multi-latent attention with what it cannot do, or would compute otherwise, is refused in one line before any rank
starts.
"""

from __future__ import annotations

from typing import Any

import pytest

from grpo_mega import config as configs
from grpo_mega.cli.checks.machine import Machine
from grpo_mega.cli.checks.model import position_problems
from grpo_mega.cli.checks.precision import installed_problems
from grpo_mega.cli.checks.violations import cut_problems
from grpo_mega.errors import ConfigError, WeightMappingError
from grpo_mega.weights.architecture import shape_of
from tests.helpers.models import GLM, LATENT

FIELDS = LATENT | {
    "model_type": "deepseek_v3",
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "vocab_size": 102,
    "hidden_act": "silu",
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"first_k_dense_replace": 5}, "first_k_dense_replace=5; it must leave experts in one"),
        ({"kv_lora_rank": None}, "kv_lora_rank=None: must be a whole number"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2; only 1 is supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False; only True is supported for deepseek_v3"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax'; only 'sigmoid'"),
        ({"rope_interleave": False}, "rope_interleave=False; only True"),
        (
            {"n_group": 4, "topk_group": 3},
            "scores a group by its best 1 experts, DeepSeek-V3 by its best 2; name another",
        ),
        ({"n_group": 5, "topk_group": 2}, "12 experts do not make equal groups"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "'linear', which is not supported; supported are default, yarn",
        ),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7: must be even"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2; it must be num_attention_heads=4"),
        ({"num_experts_per_tok": 1}, "no gradient reaches the router"),
        (
            {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
            "only 'greedy' is supported for deepseek_v2",
        ),
        (
            {"model_type": "deepseek_v2", "num_experts_per_tok": None},
            "num_experts_per_tok=None; it must be from 1 to 12",
        ),
    ],
)
def test_a_model_that_megatron_would_compute_otherwise_is_refused(changes: dict[str, Any], says: str) -> None:
    shape_of(FIELDS)
    with pytest.raises((ConfigError, WeightMappingError)) as caught:
        shape_of(FIELDS | changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": False}, "attention_bias=False; only True is supported for glm4_moe"),
        ({"partial_rotary_factor": 1.0}, "partial_rotary_factor=1.0; only 0.5"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False; only True"),
        ({"n_group": 4, "topk_group": 3}, "scores a group by its best 1 experts"),
    ],
)
def test_a_glm_of_another_kind_is_refused(changes: dict[str, Any], says: str) -> None:
    fields = FIELDS | GLM | {"model_type": "glm4_moe", "head_dim": 12, "partial_rotary_factor": 0.5}
    assert shape_of(fields).qk_norm == 0 and shape_of(fields | {"use_qk_norm": True}).qk_norm == 12
    with pytest.raises((ConfigError, WeightMappingError)) as caught:
        shape_of(fields | changes)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "rollout={engine: sglang, tp: 8, ep: 8}",
            "rollout.ep=8 does not divide the 12 experts of a layer; use a divisor",
        ),
        ("layout.tp=2", "layout.tp=2 needs layout.sequence_parallel=true or a dense model, not "),
        (
            "layout={tp: 8, sequence_parallel: true}",
            "layout.tp=8 does not divide the model's 4 attention heads; use 1, 2, 4",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_refused_with_its_remedy(override: str, says: str) -> None:
    raw: dict[str, Any] = {"run_dir": "unused", "steps": 1, "model": {"path": "unused", "dtype": "bfloat16"}}
    raw |= {"data": {"train": "unused"}, "batch": {"prompts_per_step": 8}}
    shape = shape_of(FIELDS)
    assert not list(cut_problems(configs.validate(raw), shape))
    configs.apply_override(raw, override)
    assert any(says in problem for problem in cut_problems(configs.validate(raw), shape))


def test_grouped_experts_need_experts_and_transformer_engine() -> None:
    raw: dict[str, Any] = {
        "run_dir": "unused",
        "steps": 1,
        "data": {"train": "unused"},
        "batch": {"prompts_per_step": 8},
    }
    raw["model"] = {"path": "unused", "grouped_experts": True, "fused_permutation": True}
    assert not list(cut_problems(configs.validate(raw), shape_of(FIELDS)))
    dense = {"model_type": "llama"} | {
        name: FIELDS[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    }
    dense |= {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    assert list(cut_problems(configs.validate(raw), shape_of(dense))) == [
        f"model.{name}=true needs a model with experts, not llama; leave {name} out"
        for name in ("grouped_experts", "fused_permutation")
    ]
    assert [p.partition(";")[0] for p in installed_problems(configs.validate(raw), Machine(1, 1))] == [
        f"model.{name}=true needs Transformer Engine" for name in ("grouped_experts", "fused_permutation")
    ]


def test_settings_of_routers_need_routers_and_a_bias_to_move() -> None:
    raw: dict[str, Any] = {
        "run_dir": "unused",
        "steps": 1,
        "data": {"train": "unused"},
        "batch": {"prompts_per_step": 8},
    }
    raw["model"] = {"path": "unused", "router": {"freeze": False, "bias_update_rate": 0.001}}
    dense = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    problems = [
        list(cut_problems(configs.validate(raw), shape_of(fields)))
        for fields in (FIELDS, dense | experts | {"vocab_size": 102}, dense | {"vocab_size": 102})
    ]
    assert problems == [
        [],
        ["model.router.bias_update_rate=0.001 needs a bias per expert, not mixtral; use balancing=seq_aux_loss"],
        ["model.router.bias_update_rate=0.001 needs a model with experts, not llama; leave bias_update_rate out"],
    ]


def test_yarn_that_server_and_trainer_read_differently_is_refused() -> None:
    raw = {"run_dir": "r", "steps": 1, "model": {"path": "m"}, "data": {"train": "t", "max_prompt_length": 8}}
    raw |= {"batch": {"prompts_per_step": 4, "tokens_per_micro_batch": 2048}, "rollout": {"engine": "sglang"}}
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 0.7}
    fields = {"rope_parameters": rope, "max_position_embeddings": 10**6}
    (said,) = position_problems(configs.validate(raw), fields)
    assert "mscale_all_dim=0.7 without mscale" in said
    assert not list(position_problems(configs.validate(raw), fields | {"rope_parameters": rope | {"mscale": 1.0}}))
    embedded = configs.validate(raw | {"rollout": {"engine": "embedded"}})
    assert not list(position_problems(embedded, fields))
