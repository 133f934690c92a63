"""Multi-tensor kernels: scaling, norms, FP8 scales, and Adam's step in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.te_on_cpu.emulated_te.extension.casts import cast, scale_of
from tests.te_on_cpu.emulated_te.extension.names import DType

Lists = list[list[torch.Tensor]]


def multi_tensor_scale(chunk_size: int, noop: torch.Tensor, lists: Lists, scale: float) -> None:
    """Write scale * the first list into the second list. Set `noop` to 1 if a value is not finite."""
    for source, target in zip(*lists, strict=True):
        if not bool(source.isfinite().all()):
            noop.fill_(1)
        target.copy_(source.float() * scale)


def multi_tensor_l2norm(
    chunk_size: int, noop: torch.Tensor, lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors together, and with `per_tensor` also the norm of each."""
    norms = torch.stack([t.float().norm() for t in lists[0]]) if lists[0] else torch.zeros(0)
    return norms.square().sum().sqrt().reshape(1), norms if per_tensor else torch.zeros(0)


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int, noop: torch.Tensor, lists: Lists, max_fp8: float, force_pow_2_scales: bool, epsilon: float
) -> None:
    """Write scales and their inverses for lists of [maxima, scales, inverses]."""
    fp8 = DType.kFloat8E4M3 if max_fp8 == 448 else DType.kFloat8E5M2
    for amax, scale, scale_inv in zip(*lists, strict=True):
        scale.copy_(scale_of(amax, fp8, force_pow_2_scales, epsilon))
        scale_inv.copy_(scale.reciprocal())


@dataclass(frozen=True)
class _Adam:
    """The constants of one step. Mode 1 decouples the weight decay (AdamW)."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    step: int
    mode: int
    bias_correction: int
    decay: float

    def updated(self, g: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the new fp32 values of `p`. Update `m` and `v` in place, rounded to their dtype."""
        grad = g.float() if self.mode else g.float() + self.decay * p
        first = self.beta1 * m.float() + (1 - self.beta1) * grad
        second = self.beta2 * v.float() + (1 - self.beta2) * grad * grad
        m.copy_(first)
        v.copy_(second)
        corrections = (1 - self.beta1**self.step, 1 - self.beta2**self.step) if self.bias_correction else (1.0, 1.0)
        update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + self.epsilon)
        return p - self.lr * (update + self.decay * p if self.mode else update)


def multi_tensor_adam(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update lists of [gradients, parameters, first moments, second moments], and fp32 masters if there is a fifth
    list.
    """
    adam = _Adam(lr, beta1, beta2, epsilon, step, int(mode), bias_correction, weight_decay)
    for g, p, m, v, *masters in zip(*lists, strict=True):
        new = adam.updated(g, (masters[0] if masters else p).float(), m, v)
        for master in masters:
            master.copy_(new)
        p.copy_(new)


def multi_tensor_adam_fp8(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: DType,
) -> None:
    """Update parameters that are FP8 bits as above. The further lists are [masters, scales, maxima, inverse scales]."""
    adam = _Adam(lr, beta1, beta2, epsilon, step, int(mode), bias_correction, weight_decay)
    for g, p, m, v, master, scale, amax, scale_inv in zip(*lists, strict=True):
        new = adam.updated(g, master.float(), m, v)
        master.copy_(new)
        p.copy_(cast(new, scale, DType(fp8_dtype)))
        amax.copy_(torch.maximum(amax, new.abs().amax()))
        scale_inv.copy_(scale.reciprocal())
