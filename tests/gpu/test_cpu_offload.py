"""An optimizer on the CPU takes the steps of the usual one and of torch's AdamW, and its state stays on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_mega.distributed.device import Device
from grpo_mega.megatron import optimizer as optimizers
from grpo_mega.megatron.policy import Policy
from tests.helpers.gpu_policies import MadePolicy, make_policy, make_samples, packed
from tests.helpers.models import VOCAB_SIZE

pytestmark = pytest.mark.rehearsed
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.8, 0.97), 1e-6, 0.1
SETTINGS = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "clip_grad": 0.0}


def train(policy: MadePolicy, step: int) -> None:
    [metrics] = policy.update(policy.attach_logprobs(packed(policy, make_samples(6, VOCAB_SIZE, seed=step))))
    assert metrics["grad_norm"] > 0 and not metrics["dropped_mini_batches"]


def weights_of(policy: Policy) -> list[Tensor]:
    return [p.detach().float().cpu().clone() for p in policy.parameters.values()]


def test_three_steps_equal_the_usual_optimizers_and_torchs(device: Device) -> None:
    """torch's AdamW gets the gradients that the usual policy computes, so both see the same numbers.

    The optimizer on the CPU sees them in the first step only. Then some weights differ by their rounding to bf16, and
    where a gradient is about 0, Adam's step has another sign.
    """
    gradients: list[list[Tensor]] = []
    usual = make_policy(device, optimizer=SETTINGS)
    start = weights_of(usual)
    step = usual._optimizer.step

    def recorded() -> object:
        gradients.append([p.main_grad.detach().cpu().clone() for p in usual.parameters.values()])
        return step()

    usual._optimizer.step = recorded
    expected = []
    for i in range(3):
        train(usual, i)
        expected.append(weights_of(usual))
    offloaded = make_policy(device, optimizer=SETTINGS | {"cpu_offload": True})
    assert all(torch.equal(a, b) for a, b in zip(start, weights_of(offloaded), strict=True))
    found = []
    for i in range(3):
        train(offloaded, i)
        found.append(weights_of(offloaded))
        offloaded.memory.offload_optimizer()
        offloaded.memory.offload_weights()
        offloaded.memory.onload()

    masters = [torch.nn.Parameter(p.clone()) for p in start]
    decays = [WEIGHT_DECAY * (p.dim() > 1) for p in masters]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(masters, decays, strict=True)]
    adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    assert len(gradients) == 3
    for of_step in gradients:
        for p, gradient in zip(masters, of_step, strict=True):
            p.grad = gradient
        adam.step()
    mine, theirs = zip(*found, strict=True), zip(*expected, strict=True)
    for name, first, ours, usual_ones, oracle in zip(usual.parameters, start, mine, theirs, masters, strict=True):
        moved = usual_ones[2] - first
        assert moved.abs().max() > LR, name
        for one, other in ((ours[0], usual_ones[0]), (usual_ones[2], oracle.detach().bfloat16().float())):
            assert (one - other).abs().max() < 0.02 * moved.abs().max(), name
            assert (one != other).float().mean() < 0.02, name
        assert (ours[2] - usual_ones[2]).norm() < 0.1 * moved.norm(), name


def test_its_state_stays_on_the_host_and_either_optimizer_can_resume_it(device: Device, tmp_path: Path) -> None:
    for name in ("untrained", "trained"):
        (tmp_path / name).mkdir()
    policy = make_policy(device, optimizer=SETTINGS | {"cpu_offload": True, "clip_grad": 0.1})
    policy.save(tmp_path / "untrained")
    train(policy, 0)
    assert {p.device.type for p in optimizers.main_parameters(policy._optimizer)} == {"cpu"}
    for state in policy._optimizer.optimizer.state.values():
        assert {value.device.type for value in state.values()} == {"cpu"}
        assert {"master_param", "exp_avg", "exp_avg_sq", "step"} == state.keys()
    policy.save(tmp_path / "trained")
    fingerprint = policy.fingerprint()
    train(policy, 1)
    expected = weights_of(policy)
    for cpu_offload in (True, False):
        other = make_policy(device, optimizer=SETTINGS | {"cpu_offload": cpu_offload, "clip_grad": 0.1})
        other.restore(tmp_path / "untrained")
        train(other, 7)
        other.restore(tmp_path / "trained")
        assert not cpu_offload or other.fingerprint() == fingerprint
        train(other, 1)
        for name, mine, theirs in zip(policy.parameters, weights_of(other), expected, strict=True):
            assert (mine != theirs).float().mean() < 0.02, (name, cpu_offload)
