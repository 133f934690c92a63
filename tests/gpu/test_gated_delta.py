"""Linear attention: Transformer Engine's layers against local layers, and FLA's kernels against plain torch."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from megatron.core.ssm import gated_delta_net
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.megatron.loaded_kernels import attention_notes, in_use
from grpo_mega.megatron.policy import Policy
from tests.helpers.gpu_policies import (
    assert_close,
    gradients_of,
    logits_of,
    make_policy,
    make_samples,
    packed,
    use_local_layers,
)
from tests.helpers.models import VOCAB_SIZE, make_config

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# Every token uses all experts, so rounding cannot select another expert.
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 192}
FAMILIES: dict[str, dict[str, int]] = {"qwen3_5_text": {}, "qwen3_5_moe_text": EXPERTS}
# allowed relative error of a tensor's norm
ALLOWED = {"float32": 1e-3 if torch.cuda.is_available() else 1e-5, "bfloat16": 0.05}


def numbers(device: Device, dtype: str, family: str = "qwen3_5_text") -> dict[str, Tensor]:
    """Return logits and gradients, keyed by the names of separate norms."""
    policy = policy_of(device, family, dtype)
    samples = make_samples(6, VOCAB_SIZE)
    found = {f"logits {i}": logits for i, logits in enumerate(logits_of(policy, samples))}
    return found | {plain_name(name): gradient for name, gradient in gradients_of(policy, samples).items()}


def policy_of(device: Device, family: str, dtype: str) -> Policy:
    return make_policy(device, make_config(family, **SIZES, **FAMILIES[family]), dtype=dtype)


def plain_name(name: str) -> str:
    name = re.sub(r"experts\.(linear_fc\d\.weight)(\d+)$", r"experts.local_experts.\2.\1", name)
    name = re.sub(r"self_attention\.(linear_qkv|in_proj)\.layer_norm_weight", "input_layernorm.weight", name)
    return name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


@pytest.mark.emulated
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ALLOWED)
def test_hybrid_layers_of_both_kinds_give_the_same_numbers(
    dtype: str, family: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_use(device).transformer_engine:
        pytest.skip("needs Transformer Engine")
    found = numbers(device, dtype, family)
    is_missing = device.is_cuda and gated_delta_net.chunk_gated_delta_rule is None  # an emulated card is a CPU
    assert any("pip install flash-linear-attention" in note for note in attention_notes) == is_missing
    use_local_layers(monkeypatch)
    assert any("A_log" in name for name in found)
    assert_close(found, numbers(device, dtype, family), ALLOWED[dtype])


@pytest.mark.emulated
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_transformer_engines_layers_restores_to_local_ones(
    family: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_use(device).transformer_engine:
        pytest.skip("needs Transformer Engine")
    policy = policy_of(device, family, "bfloat16")
    policy.update(policy.attach_logprobs(packed(policy, make_samples(6, VOCAB_SIZE))))
    policy.save(tmp_path)
    use_local_layers(monkeypatch)
    restored = policy_of(device, family, "bfloat16")
    restored.restore(tmp_path)
    saved, found = ({plain_name(n): p.detach() for n, p in one.tensors().items()} for one in (policy, restored))
    assert saved.keys() == found.keys() and all(torch.equal(found[name], p) for name, p in saved.items())


@pytest.mark.parametrize("dtype", ALLOWED)
def test_flas_kernels_give_the_numbers_of_plain_torch(
    dtype: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLA reads packed samples as they are; plain torch reads right-padded batches."""
    if not device.is_cuda or importlib.util.find_spec("fla") is None:
        pytest.skip("needs a GPU, and torch sees none here" if not device.is_cuda else "needs flash-linear-attention")
    found = numbers(device, dtype)
    monkeypatch.setattr(gated_delta_net, "chunk_gated_delta_rule", None)
    assert_close(found, numbers(device, dtype), ALLOWED[dtype])
