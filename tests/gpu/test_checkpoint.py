"""A policy on a GPU resumes from its checkpoint as if it had never stopped, with any of the Adam optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mega.distributed.device import Device
from grpo_mega.megatron.loaded_kernels import in_use
from tests.helpers.gpu_policies import MadePolicy, make_policy, make_samples, packed, supported_precisions
from tests.helpers.models import VOCAB_SIZE

FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "moments in bf16": {"optimizer": {"lr": 1e-3, "moments_dtype": "bfloat16"}},
    "weights in fp8": {"precision": {"fp8": "hybrid", "fp8_parameters": True, "fp8_reference": True}},
    "delayed scaling": {"precision": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_reference": True}},
}


def train(policy: MadePolicy, step: int) -> dict[str, float]:
    [metrics] = policy.update(policy.attach_logprobs(packed(policy, make_samples(6, VOCAB_SIZE, seed=step))))
    return metrics


def need(form: str, device: Device) -> None:
    if form != "bf16" and not in_use(device).transformer_engine:
        pytest.skip("needs Transformer Engine")
    recipe = {"weights in fp8": "tensorwise", "delayed scaling": "delayed"}.get(form)
    if recipe and (reason := supported_precisions(device)[recipe]):
        pytest.skip(reason)


@pytest.mark.emulated
@pytest.mark.rehearsed
@pytest.mark.parametrize("form", FORMS)
def test_a_policy_that_was_never_trained_is_saved_and_restored(form: str, device: Device, tmp_path: Path) -> None:
    """Neither the saved policy nor the new one has Adam state yet."""
    need(form, device)
    sections = {"optimizer": {"lr": 1e-3}} | FORMS[form]
    policy = make_policy(device, **sections)
    policy.save(tmp_path)
    expected = [train(policy, step) for step in range(2)]
    for has_states in (False, True):
        restored = make_policy(device, **sections)
        if has_states:
            train(restored, 5)
        restored.restore(tmp_path)
        found = [train(restored, step) for step in range(2)]
        for before, after in zip(expected, found, strict=True):
            for name in ("loss/total", "grad_norm", "mismatch/abs_mean"):
                assert after[name] == pytest.approx(before[name], rel=1e-3 if device.is_cuda else 0.0, abs=1e-7), name


@pytest.mark.emulated
@pytest.mark.rehearsed
@pytest.mark.parametrize("form", FORMS)
def test_a_restored_policy_continues_like_the_saved_one(form: str, device: Device, tmp_path: Path) -> None:
    need(form, device)
    sections = {"optimizer": {"lr": 1e-3}} | FORMS[form]
    policy = make_policy(device, **sections)
    for step in range(3):
        train(policy, step)
    policy.save(tmp_path)
    saved, weights = policy.fingerprint(), {n: t.detach().clone() for n, t in policy.tensors().items()}
    expected = train(policy, 3)
    restored = make_policy(device, **sections)
    restored.restore(tmp_path)
    assert restored.fingerprint() == saved and restored.optimizer_step == 3
    for name, weight in restored.tensors().items():
        assert torch.equal(weight, weights[name]), name
    found = train(restored, 3)
    tolerance = 1e-3 if device.is_cuda else 0.0  # CUDA kernels add in no fixed order
    for name in ("loss/total", "grad_norm", "mismatch/abs_mean"):
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=1e-7), name
