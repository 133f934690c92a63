"""Transformer Engine's Adam and multi-tensor kernels on emulated kernels, against torch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.optimizers import FusedAdam

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = ((7, 13), (5,), (129, 3))


def gradients(steps: int) -> list[list[torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    return [[torch.randn(*shape, generator=random, dtype=torch.float64) for shape in SHAPES] for _ in range(steps)]


def start() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(6)
    return [torch.randn(*shape, generator=random, dtype=torch.float64) for shape in SHAPES]


def torchs_weights(steps: int, *, is_decoupled: bool) -> list[torch.Tensor]:
    weights = [p.clone().requires_grad_() for p in start()]
    adam = (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(weights, **SETTINGS)  # type: ignore[arg-type]
    for grads in gradients(steps):
        for p, grad in zip(weights, grads, strict=True):
            p.grad = grad
        adam.step()
    return [p.detach() for p in weights]


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_adam_takes_the_steps_of_torchs(is_decoupled: bool) -> None:
    weights = [p.float().requires_grad_() for p in start()]
    adam = FusedAdam(weights, adam_w_mode=is_decoupled, **SETTINGS)  # type: ignore[arg-type]
    for grads in gradients(6):
        for p, grad in zip(weights, grads, strict=True):
            p.grad = grad.float()
        adam.step()
    for found, expected in zip(weights, torchs_weights(6, is_decoupled=is_decoupled), strict=True):
        assert (found.detach().double() - expected).norm() <= 1e-6 * expected.norm()


def test_fp32_masters_take_the_steps_and_bf16_weights_round_them() -> None:
    """Moments in bf16 keep 8 bits."""
    for moments, rounding in ((torch.float32, 1e-6), (torch.bfloat16, 2e-3)):
        weights = [p.bfloat16().requires_grad_() for p in start()]
        kinds = {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
        adam = FusedAdam(weights, master_weights=True, use_decoupled_grad=True, **kinds, **SETTINGS)  # type: ignore[arg-type]
        for p, exact in zip(weights, start(), strict=True):
            adam.initialize_state(p, False)
            adam.set_scaled_state(p, "master_param", exact.float())
        for grads in gradients(6):
            for p, grad in zip(weights, grads, strict=True):
                p.decoupled_grad = grad.float()  # type: ignore[attr-defined]
            adam.step()
        for p, expected in zip(weights, torchs_weights(6, is_decoupled=True), strict=True):
            state = adam.state[p]
            assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is moments
            assert (state["master_param"].double() - expected).norm() <= rounding * expected.norm()
            assert torch.equal(p.detach(), state["master_param"].bfloat16())


def test_norms_and_scaling_over_lists() -> None:
    tensors = [t.float() for t in start()]
    total, each = tex.multi_tensor_l2norm(65536, torch.zeros(1, dtype=torch.int32), [tensors], True)
    norms = torch.stack([t.double().norm() for t in tensors])
    torch.testing.assert_close(each.double(), norms, rtol=1e-6, atol=0)
    torch.testing.assert_close(total.double(), norms.square().sum().sqrt().reshape(1), rtol=1e-6, atol=0)
    for value, is_overflow in ((1.0, False), (torch.inf, True), (torch.nan, True)):
        source = [tensors[0].clone(), tensors[1].clone()]
        source[1][2] = value
        target, noop = [torch.zeros_like(t) for t in source], torch.zeros(1, dtype=torch.int32)
        tex.multi_tensor_scale(65536, noop, [source, target], 0.25)
        assert bool(noop) == is_overflow
        for a, b in zip(itertools.chain(*[[source[0]]]), [target[0]], strict=True):
            assert torch.equal(a * 0.25, b)
