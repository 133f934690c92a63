"""Grouped expert products and fused token permutation against one linear layer per expert."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.megatron.loaded_kernels import in_use
from tests.helpers.gpu_policies import SIZES, gradients_of, logits_of, make_policy, make_samples, packed
from tests.helpers.models import make_config

ROUNDING = 0.03  # allowed relative error of a tensor's norm, from bf16 rounding


def trained(device: Device, **model: bool) -> dict[str, Tensor]:
    """Train one step. Return its gradients, keyed by grouped expert names, and the logits after it."""
    hf_config = make_config("qwen3_moe", **(SIZES | {"moe_intermediate_size": 128}))
    policy = make_policy(device, hf_config, model=model, optimizer={"lr": 1e-3})
    is_grouped = [bool(re.search(r"experts\.linear_fc1\.weight\d$", name)) for name in policy.parameters]
    assert any(is_grouped) == model["grouped_experts"]
    samples = make_samples(6, hf_config.vocab_size)
    found = gradients_of(policy, samples)
    found = {_as_grouped(name): gradient for name, gradient in found.items()}
    policy.update(policy.attach_logprobs(packed(policy, samples)))
    return found | {f"logits {i}": logits for i, logits in enumerate(logits_of(policy, samples))}


def _as_grouped(name: str) -> str:
    return re.sub(r"local_experts\.(\d+)\.(.*)", r"\2\1", name)


def check(device: Device, **model: bool) -> None:
    if not in_use(device).transformer_engine:
        pytest.skip("needs Transformer Engine")
    found, expected = trained(device, **model), trained(device, grouped_experts=False, fused_permutation=False)
    # Two of four layers have experts.
    assert found.keys() == expected.keys() and sum("weight3" in name for name in found) == 8
    wrong = {name: float((found[name] - e).norm() / e.norm()) for name, e in expected.items()}
    assert all(error < ROUNDING for error in wrong.values()), wrong


@pytest.mark.emulated
def test_grouped_products_train_as_one_linear_layer_per_expert(device: Device) -> None:
    check(device, grouped_experts=True, fused_permutation=False)


@pytest.mark.emulated
def test_a_checkpoint_of_grouped_experts_restores_to_separate_layers(device: Device, tmp_path: Path) -> None:
    hf_config = make_config("qwen3_moe", **(SIZES | {"moe_intermediate_size": 128}))
    policy = make_policy(device, hf_config, model={"grouped_experts": True}, optimizer={"lr": 1e-3})
    samples = make_samples(6, hf_config.vocab_size)
    policy.update(policy.attach_logprobs(packed(policy, samples)))
    policy.save(tmp_path)
    expected = {name: p.detach().cpu() for name, p in policy.tensors().items()}
    restored = make_policy(device, hf_config, model={"grouped_experts": False}, optimizer={"lr": 1e-3})
    restored.restore(tmp_path)
    found = {_as_grouped(name): p.detach().cpu() for name, p in restored.tensors().items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], p) for name, p in expected.items())


@pytest.mark.emulated
def test_a_fused_permutation_trains_as_the_plain_one(device: Device) -> None:
    check(device, grouped_experts=True, fused_permutation=True)
