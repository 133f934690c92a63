"""Log-probabilities and entropies of a softmax whose vocabulary is split over tensor-parallel ranks.

In: this rank's [T, padded_vocab / tp] shard of the logits. Out: [T] vectors, the same on every rank of the group. No [T, V]
array other than the logits and their gradient ever exists: forward and backward walk over tiles of tokens, in float32 (float64
for float64 logits). The forward costs two collectives on [T] vectors (a max and a sum), the backward none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# exp of it is 0 in float64 as in float32, yet it can be multiplied with anything finite: where p is 0, p * log p stays 0.
_LOG_ZERO = -1e4


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    tile: int = 1024,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of `targets_T` under softmax(logits / temperature), and the softmax's entropies if asked for.

    logits_TV: [T, width] float32, bfloat16 or float64; rank r of `tp_group` holds columns r * width to (r + 1) * width of the
    padded vocabulary. Columns from `vocab_size` on are padding and never reach the softmax. targets_T: [T] int64, each in
    0 .. vocab_size - 1. Logits of -inf have probability 0; a row of nothing else has no softmax and gives NaN.
    Returns logprobs_T and entropy_T (nats; None without `with_entropy`), float32 (float64 for float64 logits). Gradients
    flow to the logits from both, in the logits' dtype. All ranks of the group must call with the same T.
    """
    width = logits_TV.shape[1]
    start = width * (dist.get_rank(tp_group) if tp_group is not None else 0)
    shard = _Shard(start, max(0, min(width, vocab_size - start)), temperature, tile)
    return _VocabParallelLogprobs.apply(logits_TV, targets_T, shard, tp_group, with_entropy)


@dataclass(frozen=True)
class _Shard:
    """Which columns of the vocabulary a rank holds, and how its logits are walked over."""

    start: int
    num_columns: int  # those that are no padding; 0 on a rank that holds padding only
    temperature: float
    tile: int

    def tiles(self, logits_TV: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields (tokens of the tile, its scaled logits [n, num_columns] in the dtype of computation)."""
        for begin in range(0, logits_TV.shape[0], self.tile):
            tokens = slice(begin, begin + self.tile)
            x_nv = logits_TV[tokens, : self.num_columns].to(_compute_dtype(logits_TV))
            yield tokens, x_nv if self.temperature == 1.0 else x_nv / self.temperature

    def columns(self, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        """Each target's column in this shard (any valid column if it is elsewhere), and whether it is here."""
        column_T = targets_T - self.start
        is_here_T = (column_T >= 0) & (column_T < self.num_columns)
        return torch.where(is_here_T, column_T, 0), is_here_T


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        shard: _Shard,
        tp_group: dist.ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        local_max_T, sums_kT = _local_statistics(logits_TV, targets_T, shard, with_entropy)
        max_T = local_max_T.clone()
        if tp_group is not None:
            dist.all_reduce(max_T, dist.ReduceOp.MAX, group=tp_group)
        _shift(sums_kT, local_max_T - max_T)
        if tp_group is not None:
            dist.all_reduce(sums_kT, group=tp_group)
        target_T, sum_exp_T = sums_kT[0], sums_kT[1]
        log_sum_T = sum_exp_T.log()
        # Both terms of the entropy are >= 0, so that nothing cancels: log sum e^y - sum y e^y / sum e^y with y = x - max <= 0.
        entropy_T = log_sum_T - sums_kT[2] / sum_exp_T if with_entropy else None
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits_TV, targets_T, max_T, log_sum_T, entropy_T)
        return (target_T - max_T) - log_sum_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        """d logprob / dx_j = [j = target] - p_j and d entropy / dx_j = -p_j (log p_j + entropy), over the temperature."""
        logits_TV, targets_T, max_T, log_sum_T, entropy_T = ctx.saved_tensors
        shard: _Shard = ctx.shard
        if grad_logprobs_T is not None:
            grad_logprobs_T = grad_logprobs_T / shard.temperature
        if grad_entropy_T is not None:
            grad_entropy_T = grad_entropy_T / shard.temperature
        column_T, is_here_T = shard.columns(targets_T)
        grad_TV = torch.empty_like(logits_TV)
        grad_TV[:, shard.num_columns :] = 0
        for tokens, x_nv in shard.tiles(logits_TV):
            logp_nv = (x_nv - max_T[tokens, None]).sub_(log_sum_T[tokens, None])
            if grad_entropy_T is None:
                grad_nv = logp_nv.exp_().mul_(-grad_logprobs_T[tokens, None] if grad_logprobs_T is not None else 0)
            else:
                p_nv = logp_nv.clamp_(min=_LOG_ZERO).exp()
                grad_nv = logp_nv.add_(entropy_T[tokens, None]).mul_(-grad_entropy_T[tokens, None])
                if grad_logprobs_T is not None:
                    grad_nv.sub_(grad_logprobs_T[tokens, None])
                grad_nv.mul_(p_nv)
            if grad_logprobs_T is not None and shard.num_columns:
                grad_target_n1 = (grad_logprobs_T[tokens] * is_here_T[tokens]).unsqueeze(1)
                grad_nv.scatter_add_(1, column_T[tokens, None], grad_target_n1)
            grad_TV[tokens, : shard.num_columns] = grad_nv
        return grad_TV, None, None, None, None


def _local_statistics(logits_TV: Tensor, targets_T: Tensor, shard: _Shard, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """The shard's max_T, and rows of sums [k, T]: target logit, sum e^y, and with entropy sum y e^y, with y = x - max."""
    dtype = _compute_dtype(logits_TV)
    floor = torch.finfo(dtype).min  # stands for -inf, whose differences would be NaN
    num_tokens = logits_TV.shape[0]
    max_T = torch.full((num_tokens,), floor, dtype=dtype, device=logits_TV.device)
    sums_kT = torch.zeros((3 if with_entropy else 2, num_tokens), dtype=dtype, device=logits_TV.device)
    if shard.num_columns == 0:
        return max_T, sums_kT
    column_T, is_here_T = shard.columns(targets_T)
    for tokens, x_nv in shard.tiles(logits_TV):
        max_T[tokens] = x_nv.amax(dim=1).clamp_(min=floor)
        target_n = x_nv.gather(1, column_T[tokens, None]).squeeze(1)
        sums_kT[0, tokens] = torch.where(is_here_T[tokens], target_n, 0)
        y_nv = x_nv - max_T[tokens, None]
        if with_entropy:
            exp_nv = y_nv.clamp_(min=_LOG_ZERO).exp()
            sums_kT[2, tokens] = y_nv.mul_(exp_nv).sum(dim=1)
        else:
            exp_nv = y_nv.exp_()
        sums_kT[1, tokens] = exp_nv.sum(dim=1)
    return max_T, sums_kT


def _shift(sums_kT: Tensor, delta_T: Tensor) -> None:
    """Restates the sums over y = x - local max for the group's max, in place; delta_T = local max - the group's max <= 0."""
    delta_T = delta_T.clamp(min=_LOG_ZERO)
    if sums_kT.shape[0] == 3:
        sums_kT[2].add_(delta_T * sums_kT[1])
    sums_kT[1:].mul_(delta_T.exp())


def _compute_dtype(logits_TV: Tensor) -> torch.dtype:
    return torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
