"""KL divergences: estimates from the log-probabilities of sampled tokens, and sums over the whole vocabulary.
Differentiable.

`kl_penalty` takes logprobs and ref_logprobs of the same shape and returns a penalty of that shape, 0 if both agree.
`vocab_parallel_kl` takes hidden states of policy and teacher, and both output weights with the same rows of the
vocabulary on a rank. It returns [T] nats, the same on every rank of the group. Only one tile of [T, V] exists at a
time, as in logprobs.py. `adapted_beta` adapts the penalty's weight between steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_mega.algorithm.inputs import MAX_LOG_RATIO, bounded
from grpo_mega.algorithm.logprobs import LOG_ZERO, VocabShard, gradients, operand, shard_of, statistics
from grpo_mega.config.algorithm import KL_CLAMP, AlgorithmConfig, KLPenalty


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kind: KLPenalty,
    *,
    old_logprobs: Tensor | None = None,
    kl_clamp: float | None = KL_CLAMP,
) -> Tensor:
    """Return the penalty `kind` for d = logprobs - ref_logprobs (k1, k2, k3: Schulman, "Approximating KL Divergence",
    2020).

    kl          k1 = d. As a loss its gradient has mean 0 over the policy's own samples: for monitoring, or for rewards
    abs         |d|
    mse         k2 = d^2 / 2
    low_var_kl  k3 = e^-d - 1 + d, DeepSeekMath (arXiv 2402.03300) eq. 4; d clamped to +-20, the value to at most
                kl_clamp
    low_var_kl_weighted  r k3 with r = e^(logprobs - old_logprobs), DeepSeek-V3.2's unbiased estimate (arXiv
                2512.02556). Over samples of the policy before the update its mean is the KL of the current policy, and
                its gradient is that KL's gradient. The ratio has a gradient. d and log r are clamped to +-20, the
                product to at most kl_clamp
    low_var_kl+  the value of low_var_kl with the gradient of mse, d: straight-through, as in verl. The mean of k3 is
                the KL with little variance, and on-policy the mean gradient of k2 is the KL's gradient; each has only
                one of the two

    The gradient of every penalty is 0 or points towards the reference. For r k3 it is r d. A clamp on k3 alone would
    leave the ratio's gradient, and that lowers log-probs that are already below the reference. kl_clamp None clamps
    only d and log r.
    """
    distance = logprobs - ref_logprobs
    if kind == "kl":
        return distance
    if kind == "abs":
        return distance.abs()
    square = 0.5 * distance.square()
    if kind == "mse":
        return square
    penalty, most = k3(-distance), math.inf if kl_clamp is None else kl_clamp
    if kind == "low_var_kl+":
        return penalty.detach().clamp(max=most) + square - square.detach()
    if kind == "low_var_kl_weighted":
        assert old_logprobs is not None, kind
        ratio = bounded(logprobs - old_logprobs).exp()
        # If the clamp makes k3 a constant, the ratio must be a constant too.
        penalty = torch.where(distance.abs() <= MAX_LOG_RATIO, ratio, ratio.detach()) * penalty
    return penalty.clamp(max=most)


def k3(log_ratio: Tensor) -> Tensor:
    """Return e^d - 1 - d >= 0 for d = log_ratio clamped to +-20.

    For d = log p - log q its mean over samples of q is KL(q || p). It is computed with expm1, because in float32 the
    plain form is off by 5% at d = 1e-3 and meaningless below 3e-4.
    """
    d = bounded(log_ratio)
    return torch.expm1(d) - d


def adapted_beta(beta: float, kl: float, num_samples: int, a: AlgorithmConfig) -> float:
    """Return the weight of the KL penalty after a step with this mean KL (Ziegler et al., arXiv 1909.08593, section
    2.2).

    It is beta (1 + clip(kl / kl_target - 1, -0.2, 0.2) num_samples / kl_horizon), or beta if kl is not finite.
    """
    if a.kl_target is None or not math.isfinite(kl):
        return beta
    error = min(max(kl / a.kl_target - 1.0, -0.2), 0.2)
    return beta * (1.0 + error * num_samples / a.kl_horizon)


def vocab_parallel_kl(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    teacher_hidden_NG: Tensor,
    teacher_weight_VG: Tensor,
    *,
    is_reverse: bool,
    needed_T: Tensor,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    weight_grad_VH: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> Tensor:
    """Return KL(policy || teacher) if `is_reverse`, else KL(teacher || policy), of each token [T]; 0 if needed_T is
    False.

    teacher_hidden_NG holds the N needed tokens. The other arguments are as in `vocab_parallel_logprobs`.
    """
    shard = shard_of(weight_VH, vocab_size, temperature, tp_group, tile)
    index_N = torch.nonzero_static(needed_T, size=len(teacher_hidden_NG)).squeeze(1)
    teacher = (teacher_hidden_NG, teacher_weight_VG)
    kl_N = _VocabKL.apply(hidden_TH[index_N], weight_VH, *teacher, weight_grad_VH, shard, is_reverse)
    return torch.zeros_like(needed_T, dtype=kl_N.dtype).index_copy(0, index_N, kl_N)


class _VocabKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        teacher_hidden_NG: Tensor,
        teacher_weight_VG: Tensor,
        weight_grad_VH: Tensor | None,
        shard: VocabShard,
        is_reverse: bool,
    ) -> Tensor:
        log_sums = []
        for hidden, weight in ((hidden_NH, weight_VH), (teacher_hidden_NG, teacher_weight_VG)):
            targets_N = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
            max_N, sums_kN = statistics(hidden, weight, targets_N, shard, False)
            log_sums.append(max_N + sums_kN[1].log())
        log_sum_N, teacher_log_sum_N = log_sums

        def log_probs(x_nv: Tensor, spare: Tensor, tokens: slice, columns: slice) -> tuple[Tensor, Tensor]:
            """Return the log-probabilities of policy and teacher on a tile, from the policy's logits."""
            u_nv = shard.logits(operand(teacher_hidden_NG[tokens]), operand(teacher_weight_VG[columns]), spare)
            logp_nv = x_nv.sub_(log_sum_N[tokens, None]).clamp_(min=LOG_ZERO)
            return logp_nv, u_nv.sub_(teacher_log_sum_N[tokens, None]).clamp_(min=LOG_ZERO)

        kl_N = torch.zeros_like(log_sum_N)
        scratch, spare = shard.scratch(hidden_NH), shard.scratch(hidden_NH)
        for columns in shard.column_tiles():
            for tokens in shard.token_tiles(len(hidden_NH)):
                x_nv = shard.logits(operand(hidden_NH[tokens]), operand(weight_VH[columns]), scratch)
                logp_nv, logq_nv = log_probs(x_nv, spare, tokens, columns)
                of, than = (logp_nv, logq_nv) if is_reverse else (logq_nv, logp_nv)
                kl_N[tokens] += (of.exp() * (of - than)).sum(dim=1)
        if shard.tp_group is not None:
            dist.all_reduce(kl_N, group=shard.tp_group)
        ctx.log_probs, ctx.kl_N, ctx.shard, ctx.is_reverse = log_probs, kl_N, shard, is_reverse
        ctx.weight_grad_VH = weight_grad_VH
        ctx.save_for_backward(hidden_NH, weight_VH)
        return kl_N.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH = ctx.saved_tensors

        def to_logits(x_nv: Tensor, spare: Tensor, tokens: slice, columns: slice) -> Tensor:
            """Return the gradient of a tile's logits: p (log p - log q - KL) for the reverse KL, p - q for the forward
            KL.
            """
            logp_nv, logq_nv = ctx.log_probs(x_nv, spare, tokens, columns)
            if ctx.is_reverse:
                slope_nv = logp_nv.exp() * (logp_nv - logq_nv - ctx.kl_N[tokens, None])
            else:
                slope_nv = logp_nv.exp() - logq_nv.exp()
            return slope_nv.mul_(grad_N[tokens, None] * ctx.shard.inverse_temperature)

        needs = ctx.needs_input_grad[:2]
        grad_NH, grad_VH = gradients(
            hidden_NH, weight_VH, to_logits, ctx.shard, ctx.weight_grad_VH, needs, with_spare=True
        )
        return None if grad_NH is None else grad_NH.to(hidden_NH.dtype), grad_VH, None, None, None, None, None
