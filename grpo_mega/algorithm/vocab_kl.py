"""Compute the KL divergence of policy and teacher over the whole vocabulary, tile by tile as in logprobs.py.

Input: hidden states of both models, and both output weights with the same rows of the vocabulary on a rank. Output: [N] nats,
the same on every rank of the group, with gradients for the policy. Only one tile of [N, V] exists at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_mega.algorithm.logprobs import LOG_ZERO, Shard, gradients, operand, shard_of, statistics


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
    """Return KL(policy || teacher) if `is_reverse`, else KL(teacher || policy), of each token [T]; 0 if needed_T is False.

    teacher_hidden_NG holds the N needed tokens. The other arguments are as in `vocab_parallel_logprobs`.
    """
    shard, index_N = shard_of(weight_VH, vocab_size, temperature, tp_group, tile), needed_T.nonzero().squeeze(1)
    teacher = (teacher_hidden_NG, teacher_weight_VG)
    kl_N = _VocabKL.apply(hidden_TH[index_N], weight_VH, *teacher, weight_grad_VH, shard, tp_group, is_reverse)
    return torch.zeros_like(needed_T, dtype=kl_N.dtype).index_copy(0, index_N, kl_N)


@dataclass
class _Pair:
    """Log-probabilities of both models on a tile, and the upstream values for the backward."""

    log_sum_N: Tensor  # log of the sum of exponentials of the policy's logits
    hidden_NG: Tensor  # hidden states of the teacher
    weight_VG: Tensor
    teacher_log_sum_N: Tensor
    is_reverse: bool
    kl_N: Tensor
    grad_N: Tensor | None = None
    has_spare: bool = True

    def log_probs(self, x_nv: Tensor, spare: Tensor, tokens: slice, columns: slice, shard: Shard) -> tuple[Tensor, Tensor]:
        u_nv = shard.logits(operand(self.hidden_NG[tokens]), operand(self.weight_VG[columns]), spare)
        logp_nv = x_nv.sub_(self.log_sum_N[tokens, None]).clamp_(min=LOG_ZERO)
        return logp_nv, u_nv.sub_(self.teacher_log_sum_N[tokens, None]).clamp_(min=LOG_ZERO)

    def to_logits(self, x_nv: Tensor, spare: Tensor, tokens: slice, columns: slice, shard: Shard) -> Tensor:
        """Return the gradient of a tile's logits: p (log p - log q - KL) for the reverse KL, p - q for the forward KL."""
        assert self.grad_N is not None
        logp_nv, logq_nv = self.log_probs(x_nv, spare, tokens, columns, shard)
        if self.is_reverse:
            slope_nv = logp_nv.exp() * (logp_nv - logq_nv - self.kl_N[tokens, None])
        else:
            slope_nv = logp_nv.exp() - logq_nv.exp()
        return slope_nv.mul_(self.grad_N[tokens, None] * shard.inverse_temperature)


class _VocabKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        teacher_hidden_NG: Tensor,
        teacher_weight_VG: Tensor,
        weight_grad_VH: Tensor | None,
        shard: Shard,
        tp_group: dist.ProcessGroup | None,
        is_reverse: bool,
    ) -> Tensor:
        log_sums = []
        for hidden, weight in ((hidden_NH, weight_VH), (teacher_hidden_NG, teacher_weight_VG)):
            targets_N = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
            max_N, sums_kN = statistics(hidden, weight, targets_N, shard, tp_group, False)
            log_sums.append(max_N + sums_kN[1].log())
        kl_N = torch.zeros_like(log_sums[0])
        pair = _Pair(log_sums[0], teacher_hidden_NG, teacher_weight_VG, log_sums[1], is_reverse, kl_N)
        scratch, spare = shard.scratch(hidden_NH), shard.scratch(hidden_NH)
        for columns in shard.column_tiles():
            for tokens in shard.token_tiles(len(hidden_NH)):
                x_nv = shard.logits(operand(hidden_NH[tokens]), operand(weight_VH[columns]), scratch)
                logp_nv, logq_nv = pair.log_probs(x_nv, spare, tokens, columns, shard)
                of, than = (logp_nv, logq_nv) if is_reverse else (logq_nv, logp_nv)
                kl_N[tokens] += (of.exp() * (of - than)).sum(dim=1)
        if tp_group is not None:
            dist.all_reduce(kl_N, group=tp_group)
        ctx.pair, ctx.shard, ctx.weight_grad_VH = pair, shard, weight_grad_VH
        ctx.save_for_backward(hidden_NH, weight_VH)
        return kl_N.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH = ctx.saved_tensors
        ctx.pair.grad_N = grad_N
        needs = ctx.needs_input_grad[:2]
        grad_NH, grad_VH = gradients(hidden_NH, weight_VH, ctx.pair, ctx.shard, ctx.weight_grad_VH, needs=needs)
        return None if grad_NH is None else grad_NH.to(hidden_NH.dtype), grad_VH, None, None, None, None, None, None
