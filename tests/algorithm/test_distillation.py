"""Traps of distillation: code paths that could lose a teacher's part of the advantages, or its scale."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

import grpo_mega.megatron  # noqa: F401  # its patches come first
from grpo_mega import config as configs
from grpo_mega.algorithm.advantages import assign_advantages
from grpo_mega.algorithm.inputs import LossInputs
from grpo_mega.algorithm.losses import policy_loss
from grpo_mega.algorithm.token_weights import contributes_to_loss
from grpo_mega.trainer.batches import is_zero_variance
from grpo_mega.types import Group, Prompt, Sample


def config(**algorithm: Any) -> configs.Config:
    return configs.validate(
        {
            "run_dir": "unused",
            "steps": 1,
            "model": {"path": "unused"},
            "teachers": {"main": {"path": "unused"}},
            "data": {"train": "unused", "max_prompt_length": 4},
            "rollout": {"max_response_length": 8},
            "algorithm": {"group_size": 3, **algorithm},
        }
    )


def group(*rewards: float | None) -> Group:
    prompt = Prompt(0, "", (1, 2), "")
    return Group(prompt, [Sample(prompt, i, [3, 4], [-1.0, -1.0], "stop", reward=r) for i, r in enumerate(rewards)])


def gradient(inputs: LossInputs, a: configs.AlgorithmConfig) -> torch.Tensor:
    """Return the gradient of the loss for each token's log-prob."""
    logprobs = inputs.logprobs.clone().requires_grad_()
    policy_loss(replace(inputs, logprobs=logprobs), a).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


def inputs(advantages: torch.Tensor, lead: torch.Tensor) -> LossInputs:
    old, ones = torch.full_like(lead, -1.5), torch.ones_like(lead)
    segments = torch.zeros(len(lead), dtype=torch.int64)
    return LossInputs(
        logprobs=old,
        old_logprobs=old,
        rollout_logprobs=old,
        teacher_logprobs=old - lead,
        advantages=advantages,
        loss_mask=ones,
        loss_weights=ones,
        segments=segments,
        num_segments=1,
    )


def test_groups_of_equal_rewards_and_samples_without_rewards_are_taught() -> None:
    for algorithm in ({"recipe": "opd"}, {"distill_beta": 0.5}):
        one = config(**algorithm)
        for rewards in ((1.0, 1.0, 1.0), (None, None, None)):
            given = group(*rewards)
            assert not is_zero_variance(one.algorithm, given)
            assert all(contributes_to_loss(sample, one.algorithm) for sample in given.samples)
    without = SimpleNamespace(algorithm=configs.AlgorithmConfig())
    assert not contributes_to_loss(group(None).samples[0], without.algorithm)


def test_in_pure_distillation_only_the_teacher_moves_the_policy() -> None:
    a = config(recipe="opd", distill_beta=0.3).algorithm
    samples = assign_advantages([group(1.0, 0.0, 0.5)], a, max_response_length=8)
    assert all(s.advantages is not None and not s.advantages.any() for s in samples)
    lead = torch.tensor([0.7, -0.2, 0.0], dtype=torch.float64)
    assert torch.allclose(gradient(inputs(torch.zeros(3, dtype=torch.float64), lead), a), 0.3 * lead)


def test_whitening_reward_advantages_keeps_the_teachers_scale() -> None:
    a = config(normalize_advantages=True, distill_beta=0.3).algorithm
    samples = assign_advantages([group(100.0, 0.0, 50.0)], a, max_response_length=8)
    whitened = torch.stack([s.advantages[0] for s in samples if s.advantages is not None]).double()
    assert abs(float(whitened.mean())) < 1e-6
    lead = torch.tensor([0.7, -0.2, 0.1], dtype=torch.float64)
    difference = gradient(inputs(whitened, lead), a) - gradient(inputs(whitened, 0 * lead), a)
    assert torch.allclose(difference, 0.3 * lead)


def test_a_very_different_teacher_has_a_bounded_advantage() -> None:
    a = config(recipe="opd").algorithm
    lead = torch.tensor([1e9, torch.inf, -1e9], dtype=torch.float64)
    assert gradient(inputs(torch.zeros(3, dtype=torch.float64), lead), a).tolist() == [20.0, 20.0, -20.0]
