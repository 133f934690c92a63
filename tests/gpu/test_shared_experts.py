"""Models with shared experts and latent attention: Transformer Engine's layers against Megatron's local layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from grpo_mega.distributed.device import Device
from grpo_mega.megatron.attention import PackedAttention, RMSNorm
from grpo_mega.megatron.loaded_kernels import in_use
from grpo_mega.megatron.policy import Policy
from tests.helpers.gpu_policies import (
    assert_close,
    gradients_of,
    logits_of,
    make_policy,
    make_samples,
    packed,
    precision_of,
    use_local_layers,
)
from tests.helpers.models import VOCAB_SIZE, make_config

pytestmark = pytest.mark.emulated

LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"q_lora_rank": 96},
    "glm4_moe_lite": LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 96},
    "glm4_moe": {"head_dim": 64, "num_key_value_heads": 2},
}
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,
}
# In bf16 every token uses all experts, so rounding cannot select another expert.
ALL_EXPERTS = {"n_routed_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
# allowed relative error of a tensor's norm
ALLOWED = {"float32": 1e-4 if torch.cuda.is_available() else 4e-6, "bfloat16": 0.03}


def numbers(device: Device, family: str, dtype: str) -> dict[str, Tensor]:
    """Return logits and gradients, keyed by the names of separate experts and norms."""
    policy = policy_of(device, family, ALL_EXPERTS if dtype == "bfloat16" else {}, dtype=dtype)
    samples = make_samples(6, VOCAB_SIZE)
    found = {f"logits {i}": logits for i, logits in enumerate(logits_of(policy, samples))}
    return found | {plain_name(name): gradient for name, gradient in gradients_of(policy, samples).items()}


def policy_of(device: Device, family: str, sizes: Mapping[str, int], **sections: Any) -> Policy:
    return make_policy(device, make_config(family, **(SIZES | FAMILIES[family] | sizes)), **sections)


def state_of(policy: Policy) -> dict[str, Tensor]:
    return {plain_name(name): p.detach().cpu().clone() for name, p in policy.tensors().items()}


def keys_of(checkpoint: Path) -> set[str]:
    """Return the keys of a checkpoint's tensors, without the FP8 state that only Transformer Engine has."""
    keys = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key for key in keys if "_extra_state" not in key}


def plain_name(name: str) -> str:
    name = re.sub(r"experts\.(linear_fc\d\.weight)(\d+)$", r"experts.local_experts.\2.\1", name)
    name = re.sub(r"linear_(q|kv)_up_proj\.layer_norm_weight", r"\1_layernorm.weight", name)
    name = name.replace("linear_qkv.layer_norm_weight", "input_layernorm.weight").replace(
        "self_attention.input", "input"
    )
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_kinds_of_layers_give_the_same_logits_and_gradients(
    family: str, dtype: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_use(device).transformer_engine:
        pytest.skip("needs Transformer Engine")
    found = numbers(device, family, dtype)
    use_local_layers(monkeypatch)
    expected = numbers(device, family, dtype)
    assert any("shared_experts" in name for name in found)
    assert_close(found, expected, ALLOWED[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_one_kind_of_layers_restores_to_the_other(
    family: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update in FP8. The checkpoints have the same keys, so each is also read by the other kind."""
    if not in_use(device).transformer_engine:
        pytest.skip("needs Transformer Engine")
    policy = policy_of(device, family, ALL_EXPERTS, precision=precision_of("tensorwise"), optimizer={"lr": 1e-3})
    assert "layers, attention, norms, gradient accumulation and Adam are Transformer Engine's" in in_use(device).line()
    local = (ColumnParallelLinear, RowParallelLinear, PackedAttention, RMSNorm)
    assert not [module for module in policy.models[0].decoder.modules() if isinstance(module, local)]
    before = state_of(policy)
    metrics = policy.update(policy.attach_logprobs(packed(policy, make_samples(6, VOCAB_SIZE))))
    assert all(row["grad_norm"] > 0 for row in metrics)
    expected = state_of(policy)
    assert sum(not torch.equal(before[name], p) for name, p in expected.items()) > len(expected) / 2
    (tmp_path / "te").mkdir()
    policy.save(tmp_path / "te")
    use_local_layers(monkeypatch)
    restored = policy_of(device, family, ALL_EXPERTS, optimizer={"lr": 1e-3})
    restored.restore(tmp_path / "te")
    found = state_of(restored)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], p) for name, p in expected.items())
    (tmp_path / "local").mkdir()
    restored.save(tmp_path / "local")
    assert keys_of(tmp_path / "local") == keys_of(tmp_path / "te")
    monkeypatch.undo()
    again = policy_of(device, family, ALL_EXPERTS, optimizer={"lr": 1e-3})
    again.restore(tmp_path / "local")
    assert all(torch.equal(state_of(again)[name], p) for name, p in expected.items())
