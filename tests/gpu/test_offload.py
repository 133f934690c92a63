"""A policy moves between a GPU and pinned host memory: every bit comes back, and the GPU's memory is free meanwhile."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron.policy import Policy
from tests.helpers.gpu_policies import SIZES, MadePolicy, make_policy, make_samples, packed
from tests.helpers.models import VOCAB_SIZE, make_config

pytestmark = pytest.mark.rehearsed


def contents(policy: Policy) -> list[Tensor]:
    """Return checksums of weights, masters and moments, computed on the host."""
    tensors = [*policy.tensors().values(), *optimizers.state_tensors(policy._optimizer)]
    return [t.detach().cpu().clone() for t in tensors]


def train(policy: MadePolicy, step: int) -> dict[str, float]:
    [metrics] = policy.update(policy.attach_logprobs(packed(policy, make_samples(6, VOCAB_SIZE, seed=step))))
    return metrics


@pytest.mark.emulated
def test_weights_and_optimizer_come_back_from_pinned_memory_bit_for_bit(device: Device) -> None:
    policy = make_policy(device, optimizer={"lr": 1e-3})
    train(policy, 0)
    before, held = contents(policy), policy.memory.device_bytes
    for _ in range(3):
        policy.memory.offload_optimizer()
        policy.memory.offload_weights()
        assert policy.memory.device_bytes == 0
        for moved in (policy.memory._moved_weights, policy.memory._moved_optimizer):
            assert moved.copy._chunks and all(c.is_pinned() == device.is_cuda for c in moved.copy._chunks)
        policy.memory.onload()
        policy.memory.onload_optimizer()
        after = contents(policy)
        assert policy.memory.device_bytes == held and len(after) == len(before)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.emulated
def test_overlapping_copies_arrive_before_the_optimizer_needs_them(device: Device) -> None:
    """`update` starts while the optimizer state is still in transfer. Losses and weights equal a run without
    offload.
    """
    runs = []
    for is_moving in (False, True):
        policy = make_policy(device, optimizer={"lr": 1e-3}, algorithm={"kl_beta": 0.01})
        metrics = []
        for step in range(6):
            metrics.append(train(policy, step))
            if is_moving:
                policy.memory.offload_optimizer()
                policy.memory.offload_weights()
        policy.memory.onload()
        policy.memory.onload_optimizer()
        runs.append((metrics, contents(policy)))
    (staying, expected), (moving, found) = runs
    for a, b in zip(staying, moving, strict=True):
        assert a["loss/total"] == pytest.approx(b["loss/total"], rel=1e-3 if device.is_cuda else 0, abs=1e-6)
    for a, b in zip(expected, found, strict=True):
        assert (a.float() - b.float()).norm() <= (1e-2 if device.is_cuda else 0) * a.float().norm() + 1e-12


@pytest.mark.emulated
def test_a_reference_changes_places_with_the_weights(device: Device) -> None:
    policy = make_policy(device, optimizer={"lr": 1e-2}, algorithm={"kl_beta": 0.01})
    batches = packed(policy, make_samples(6, VOCAB_SIZE))
    first = [b.ref_logprobs for mini in policy.attach_logprobs(batches) for b in mini]
    for step in range(3):
        train(policy, step)
    before = contents(policy)
    later = [b.ref_logprobs for mini in policy.attach_logprobs(batches) for b in mini]
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(first, later, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, contents(policy), strict=True))


def test_the_device_has_the_memory_while_the_policy_is_away(device: Device) -> None:
    if not device.is_cuda:
        pytest.skip("needs a GPU")
    gc.collect()  # earlier policies
    sizes = SIZES | {"hidden_size": 1024, "intermediate_size": 4096}  # far larger than a block of the allocator
    policy = make_policy(device, make_config("qwen2", **sizes))
    train(policy, 0)
    torch.cuda.empty_cache()
    reserved, held = torch.cuda.memory_reserved(), policy.memory.device_bytes
    policy.memory.offload_optimizer()
    policy.memory.offload_weights()
    assert torch.cuda.memory_allocated() < reserved - held
    assert reserved - torch.cuda.memory_reserved() >= 0.5 * held  # the allocator returns blocks of 2 MiB and more
