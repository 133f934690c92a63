"""Settings that models with linear attention do not support are refused in one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mega.cli.checks.model import fact_problems, model_of, sync_problems
from grpo_mega.errors import UserError
from grpo_mega.weights.derived import sends_adapter
from grpo_mega.weights.layout import MegatronLayout, megatron_layout_problems
from grpo_mega.weights.spec import ModelShape
from tests.distributed.layout_cases import make_config
from tests.helpers.models import make_config as hf_config

FIELDS = hf_config("qwen3_5_text").to_dict()
MOE_FIELDS = hf_config("qwen3_5_moe_text").to_dict()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("layout.cp=2", "layout.cp=2 conflicts with linear attention of qwen3_5_"),
        ("batch.share_prompts=true", "batch.share_prompts=true conflicts with linear attention"),
        ("rollout.quantization=fp8", "rollout.quantization=fp8 conflicts with linear attention"),
        ("optimizer.cpu_offload=true", "optimizer.cpu_offload=true conflicts with linear attention"),
    ],
)
def test_a_setting_that_linear_attention_lacks_is_refused_in_one_line(override: str, says: str) -> None:
    config = make_config(Path("unused"), "tp=1", "model.dtype=bfloat16", override)
    for fields in (FIELDS, MOE_FIELDS):
        lines = [line for line in fact_problems(config, model_of(fields).shape) if "linear attention" in line]
        assert len(lines) == 1 and lines[0].startswith(says) and "\n" not in lines[0]
    plain = ModelShape.from_hf_config(hf_config("qwen3").to_dict())
    assert not list(fact_problems(config, plain))


def test_a_supported_config_has_no_problems() -> None:
    shape = model_of(FIELDS).shape
    assert not list(fact_problems(make_config(Path("unused"), "tp=2"), shape))
    assert not list(fact_problems(make_config(Path("unused"), "tp=2", "rollout.engine=sglang"), shape))


def test_servers_refuse_hybrid_models_with_experts_and_adapters_alone() -> None:
    config, shape = make_config(Path("unused"), "tp=1", "rollout.engine=sglang"), model_of(FIELDS).shape
    [line] = fact_problems(config, model_of(MOE_FIELDS).shape)
    assert line == ("rollout.engine=sglang conflicts with missing support in SGLang of qwen3_5_moe_text; use embedded")
    lora = make_config(Path("unused"), "tp=1", "rollout.engine=sglang", "model.lora={rank: 4}")
    assert not sends_adapter(lora.model.lora, lora.sync, lora.rollout, shape)
    [line] = sync_problems(lora.model_copy(update={"sync": lora.sync.model_copy(update={"lora": "adapter"})}), shape)
    assert line.startswith("sync.lora='adapter': must be merged for qwen3_5_text, whose linear attention")


@pytest.mark.parametrize(("tp", "says"), [(4, "key-value heads"), (3, "")])
def test_gates_and_states_are_never_split_within_a_head(tp: int, says: str) -> None:
    problems = list(megatron_layout_problems(model_of(FIELDS).shape, MegatronLayout(tp=tp)))
    assert len(problems) == 1 and says in problems[0] and problems[0].endswith("use 1, 2")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "only one kind of layer_types"),
        ({"linear_num_key_heads": 4, "linear_num_value_heads": 6}, "it must divide linear_num_value_heads=6"),
        ({"layer_types": ["mamba"] * 4}, "'mamba' among layer_types"),
        (MOE_FIELDS | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0: must be a positive"),
        (MOE_FIELDS | {"shared_expert_intermediate_size": None}, "has no field 'shared_expert_intermediate_size'"),
        (MOE_FIELDS | {"num_experts_per_tok": 1}, "num_experts_per_tok=1 for qwen3_5_moe_text"),
        (MOE_FIELDS | {"norm_topk_prob": False}, "norm_topk_prob=False; only True is supported"),
        (MOE_FIELDS | {"mlp_only_layers": [1]}, "mlp_only_layers"),
    ],
)
def test_models_without_a_mixture_of_layers_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        model_of(FIELDS | changes)
