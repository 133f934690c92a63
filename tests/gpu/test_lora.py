"""An adapter on Transformer Engine's layers against a policy whose weights are the merged ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.rollout.routes import RouterSizes, with_routes_of
from grpo_mega.types import Sample
from grpo_mega.weights.boxes import Box, region
from grpo_mega.weights.families import family_of
from grpo_mega.weights.spec import ModelShape
from tests.helpers.gpu_policies import SIZES, MadePolicy, gradients_of, logits_of, make_policy, make_samples, packed
from tests.helpers.models import make_config

ROUNDING = 0.03  # allowed relative error of a tensor's norm, from bf16 rounding
GRADIENT_ROUNDING = 0.1  # an expert's gradient is a sum over few tokens
RANK, ALPHA = 4, 8.0


@pytest.mark.rehearsed
@pytest.mark.emulated
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_adapter_computes_and_learns_like_merged_weights(family: str, device: Device) -> None:
    hf_config = make_config(family, **(SIZES | ({"moe_intermediate_size": 128} if SIZES else {})))
    samples, rollout = make_samples(6, hf_config.vocab_size), {"routing_replay": family == "qwen3_moe"}
    if rollout["routing_replay"]:  # because rounding of the merged weights would select other experts
        replay_experts(hf_config, samples)
    adapter = {"rank": RANK, "alpha": ALPHA}
    policy = make_policy(device, hf_config, model={"lora": adapter}, optimizer={"lr": 2e-2}, rollout=rollout)
    for _ in range(3):  # B starts as zeros
        policy.update(policy.attach_logprobs(packed(policy, samples)))
    logits, gradients = logits_of(policy, samples), gradients_of(policy, samples)
    weights: dict[str, Tensor] = {}
    for name, local in policy.shards.rank_shards(0).items():
        merged = policy.tensors()[name].detach().cpu()
        for piece in local.pieces:
            whole = weights.setdefault(piece.box.tensor, torch.zeros(_size_of(policy, piece.box.tensor)))
            whole[region(piece.box.start, piece.box.shape)] = merged[region(piece.offset, piece.box.shape)].float()
    pairs = {
        f"{layer}.lora.{letter}{suffix}": (f"{layer}.weight{suffix}", adapter.wide(suffix).detach().cpu().float())
        for layer, adapter in policy.lora._adapters.items()
        for suffix in adapter._suffixes
        for letter in "AB"
    }
    a = {name: p.detach().cpu().float() for name, p in policy.lora.parameters.items() if ".lora.A" in name}
    masks = {layer: adapter.mask.cpu().float() for layer, adapter in policy.lora._adapters.items()}

    def read(box: Box) -> Tensor:
        return weights[box.tensor][region(box.start, box.shape)]

    plain = make_policy(device, hf_config, read, rollout=rollout)
    for ours, theirs in zip(logits, logits_of(plain, samples), strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < ROUNDING
    expected = gradients_of(plain, samples)
    assert gradients.keys() == pairs.keys()
    for name, (weight, wide) in pairs.items():
        d_weight = expected[weight] * (ALPHA / RANK)
        if ".lora.A" in name:
            wanted = wide.T @ d_weight
        else:
            of_wide = (d_weight @ a[name.replace(".lora.B", ".lora.A")].T).unflatten(1, (-1, RANK))
            wanted = (of_wide * masks[name.partition(".lora.")[0]][:, :, None]).sum(1)
        assert float((gradients[name] - wanted).norm()) <= GRADIENT_ROUNDING * float(wanted.norm()), name


def replay_experts(hf_config: Any, samples: Sequence[Sample]) -> None:
    """Give the samples random experts for all tokens but the last."""
    routers = RouterSizes.of(ModelShape.from_hf_config(hf_config.to_dict()), hf_config)
    for seed, sample in enumerate(samples):
        random, experts = np.random.default_rng(seed), routers.not_known(sample.total_len - 1)
        for layers in experts:
            layers[:] = [random.permutation(routers.num_experts)[: routers.top_k] for _ in layers]
        sample.routes = with_routes_of(None, experts)


def _size_of(policy: MadePolicy, tensor: str) -> tuple[int, ...]:
    return family_of(policy.shape.model_type).hf_tensors(policy.shape)[tensor]
