"""Compute log-probabilities and entropies of softmax(hidden @ weight.T / temperature) over a vocabulary-parallel
weight.

Input: hidden states [T, H] and this rank's rows [padded_vocab / tp, H] of the output weight. Output: [T] vectors, the
same on every rank of the group. Logits exist one tile of tokens and columns at a time, in float32 (float64 for float64
weights). Forward and backward both compute them: a fourth matrix product is the price of never storing [T, V]. The
forward has two collectives on [T] vectors (a max and a sum). The backward has none: the hidden states' gradient is this
rank's part of a sum over the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# exp of it is 0 in float32 and float64, but it can be multiplied by any finite number: if p is 0, p * log p stays 0.
LOG_ZERO = -1e4
# Tokens and columns of a tile: on a CPU two tiles stay in its cache, on a GPU each tile keeps it busy.
_CPU_TILE, _GPU_TILE = (1024, 4096), (4096, 8192)


def vocab_parallel_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    with_entropy: bool = False,
    needed_T: Tensor | None = None,
    num_needed: int | None = None,
    skips_zeros: bool = True,
    weight_grad_VH: Tensor | None = None,
    tile: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities of `targets_T` under softmax(hidden_TH @ weight.T / temperature), and optionally
    entropies.

    hidden_TH: [T, H], the same on all ranks of `tp_group`; weight_VH: [width, H]; both float32, bfloat16 or float64.
    Rank r holds rows r * width to (r + 1) * width of the padded vocabulary. Rows from `vocab_size` on are padding: they
    are never read, and their gradient is 0. targets_T: [T] int64, each in 0 .. vocab_size - 1. Tokens with `needed_T`
    (bool) False return 0 and cost nothing. Logits of -inf have probability 0. A row of only such logits has no softmax
    and returns NaN. Returns logprobs_T and entropy_T (nats; None without `with_entropy`), float32 (float64 for float64
    weights). All ranks of the group must call with the same T and needed_T. Without `num_needed`, the number of tokens
    in needed_T, the host waits for the device to count them.

    Both have gradients. The gradient of hidden_TH is this rank's part. The operation that made hidden_TH the same on
    all ranks must add the parts up in its backward, like the input of a column-parallel linear layer. The gradient of
    the weight is summed in float32. It is returned in the weight's dtype, or with `weight_grad_VH` ([width, H]) added
    to that tensor, and the weight gets none. Tokens whose upstream gradients are 0 are skipped in the backward with
    `skips_zeros`; the host waits for the device to find them.
    """
    others = weight_grad_VH, shard_of(weight_VH, vocab_size, temperature, tp_group, tile), with_entropy, skips_zeros
    if needed_T is not None and num_needed is None:
        num_needed = int(needed_T.sum())
    if needed_T is None or num_needed is None or num_needed == len(needed_T):  # no copy of the hidden states
        return _Logprobs.apply(hidden_TH, weight_VH, targets_T, *others)
    index_N = torch.nonzero_static(needed_T, size=num_needed).squeeze(1)
    logprobs_N, entropy_N = _Logprobs.apply(hidden_TH.index_select(0, index_N), weight_VH, targets_T[index_N], *others)
    zeros_T = torch.zeros_like(needed_T, dtype=logprobs_N.dtype)
    logprobs_T = zeros_T.index_copy(0, index_N, logprobs_N)
    return logprobs_T, None if entropy_N is None else zeros_T.index_copy(0, index_N, entropy_N)


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary on a rank of `tp_group`, and the tiles of [T, V]."""

    start: int
    num_columns: int  # without padding; 0 if the rank holds only padding
    inverse_temperature: float
    tp_group: dist.ProcessGroup | None
    num_tile_tokens: int
    num_tile_columns: int

    def column_tiles(self) -> Iterator[slice]:
        return _slices(self.num_columns, self.num_tile_columns)

    def token_tiles(self, num_tokens: int) -> Iterator[slice]:
        return _slices(num_tokens, self.num_tile_tokens)

    def scratch(self, like: Tensor) -> Tensor:
        """Allocate memory for a tile in the dtype of the computation."""
        size = min(self.num_tile_tokens, like.shape[0]) * min(self.num_tile_columns, self.num_columns)
        return torch.empty(size, dtype=_compute_dtype(like), device=like.device)

    def logits(self, hidden_nH: Tensor, weight_vH: Tensor, scratch: Tensor) -> Tensor:
        """Compute a tile's scaled logits [n, v] in `scratch`."""
        x_nv = _tile_of(scratch, hidden_nH.shape[0], weight_vH.shape[0])
        _add_product(x_nv, hidden_nH, weight_vH.t(), beta=0.0, alpha=self.inverse_temperature)
        return x_nv

    def targets(self, targets_n: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return each target's column in a tile [n, 1] (0 if in another tile), and a mask [n, 1] of targets in this
        tile.
        """
        column_n1 = (targets_n - (self.start + columns.start)).unsqueeze(1)
        is_here_n1 = (column_n1 >= 0) & (column_n1 < columns.stop - columns.start)
        return torch.where(is_here_n1, column_n1, 0), is_here_n1


def shard_of(
    weight_VH: Tensor,
    vocab_size: int,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    tile: tuple[int, int] | None,
) -> VocabShard:
    width = weight_VH.shape[0]
    start = width * (dist.get_rank(tp_group) if tp_group is not None else 0)
    tile = tile or (_GPU_TILE if weight_VH.is_cuda else _CPU_TILE)
    return VocabShard(start, max(0, min(width, vocab_size - start)), 1 / temperature, tp_group, *tile)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        weight_grad_VH: Tensor | None,
        shard: VocabShard,
        with_entropy: bool,
        skips_zeros: bool,
    ) -> tuple[Tensor, Tensor | None]:
        max_T, sums_kT = statistics(hidden_TH, weight_VH, targets_T, shard, with_entropy)
        target_T, sum_exp_T = sums_kT[0], sums_kT[1]
        log_sum_T = sum_exp_T.log()
        # Both terms of the entropy are >= 0, so nothing cancels: log sum e^y - sum y e^y / sum e^y with y = x - max <=
        # 0.
        entropy_T = log_sum_T - sums_kT[2] / sum_exp_T if with_entropy else None
        ctx.shard, ctx.weight_grad_VH, ctx.skips_zeros = shard, weight_grad_VH, skips_zeros
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, max_T, sum_exp_T, entropy_T)
        return (target_T - max_T) - log_sum_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, targets_T, max_T, sum_exp_T, entropy_T = ctx.saved_tensors
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(max_T)
        index_N = torch.arange(len(hidden_TH), device=hidden_TH.device)
        if ctx.skips_zeros:
            is_moved_T = grad_logprobs_T != 0
            if grad_entropy_T is not None:
                is_moved_T |= grad_entropy_T != 0
            index_N = is_moved_T.nonzero().squeeze(1)
        # With y = x - max and p = e^y / sum e^y: d logprob / dx_j = [j = target] - p_j, and d entropy / dx_j = -p_j
        # (log p_j + entropy). Both are multiples of e^y, except at the target: e^y (slope y + offset - grad) + [j =
        # target] grad sum_exp.
        scale_N = ctx.shard.inverse_temperature / sum_exp_T[index_N]
        slope_N = offset_N = None
        if grad_entropy_T is not None:
            slope_N = -grad_entropy_T[index_N] * scale_N
            offset_N = slope_N * (entropy_T - sum_exp_T.log())[index_N]
        targets_N, max_N, sum_exp_N = targets_T[index_N], max_T[index_N], sum_exp_T[index_N]
        grad_N = grad_logprobs_T[index_N] * scale_N

        def to_logits(x_nv: Tensor, spare: Tensor, tokens: slice, columns: slice) -> Tensor:
            """Replace a tile's logits with their gradient."""
            target_n1, is_here_n1 = ctx.shard.targets(targets_N[tokens], columns)
            grad_n1 = grad_N[tokens, None]
            if slope_N is None or offset_N is None:
                grad_nv = times_exp(x_nv, max_N[tokens], -grad_n1)
            else:
                y_nv = x_nv.sub_(max_N[tokens, None])
                exp_nv = torch.exp(y_nv.clamp_(min=LOG_ZERO), out=_tile_of(spare, *y_nv.shape))
                grad_nv = torch.addcmul(offset_N[tokens, None] - grad_n1, y_nv, slope_N[tokens, None], out=y_nv)
                grad_nv.mul_(exp_nv)
            return grad_nv.scatter_add_(1, target_n1, grad_n1 * sum_exp_N[tokens, None] * is_here_n1)

        hidden_NH = hidden_TH if len(index_N) == len(hidden_TH) else hidden_TH[index_N]
        grad_hidden_NH, grad_weight_VH = gradients(
            hidden_NH,
            weight_VH,
            to_logits,
            ctx.shard,
            ctx.weight_grad_VH,
            ctx.needs_input_grad[:2],
            with_spare=slope_N is not None,
        )
        if grad_hidden_NH is not None:
            grad_hidden_NH = grad_hidden_NH.to(hidden_TH.dtype)  # here, because the tiles' memory is free again
            if hidden_NH is not hidden_TH:
                grad_hidden_NH = torch.zeros_like(hidden_TH).index_copy_(0, index_N, grad_hidden_NH)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None


def statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    shard: VocabShard,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return the vocabulary's max_T, and rows of sums [k, T] over y = x - max.

    The rows are the target logit, sum e^y, and with entropy sum y e^y.
    """
    dtype, num_tokens = _compute_dtype(weight_VH), hidden_TH.shape[0]
    # The smallest finite number replaces -inf, because differences of -inf would be NaN.
    max_T = torch.full((num_tokens,), torch.finfo(dtype).min, dtype=dtype, device=hidden_TH.device)
    sums_kT = torch.zeros((3 if with_entropy else 2, num_tokens), dtype=dtype, device=hidden_TH.device)
    scratch, spare = shard.scratch(hidden_TH), shard.scratch(hidden_TH) if with_entropy else None
    hidden_TH = operand(hidden_TH)
    for columns in shard.column_tiles():
        weight_vH = operand(weight_VH[columns])
        for tokens in shard.token_tiles(num_tokens):
            x_nv = shard.logits(hidden_TH[tokens], weight_vH, scratch)
            column_n1, is_here_n1 = shard.targets(targets_T[tokens], columns)
            sums_kT[0, tokens] += torch.where(is_here_n1, x_nv.gather(1, column_n1), 0).squeeze(1)
            max_n = torch.maximum(max_T[tokens], x_nv.amax(dim=1))
            _shift(sums_kT[:, tokens], max_T[tokens] - max_n)
            max_T[tokens] = max_n
            if spare is None:
                sums_kT[1, tokens] += exp_sum(x_nv, max_n)
            else:
                y_nv = x_nv.sub_(max_n[:, None])
                exp_nv = torch.exp(y_nv.clamp_(min=LOG_ZERO), out=_tile_of(spare, *y_nv.shape))
                sums_kT[1, tokens] += exp_nv.sum(dim=1)
                sums_kT[2, tokens] += y_nv.mul_(exp_nv).sum(dim=1)
    if shard.tp_group is not None:
        local_max_T = max_T.clone()
        dist.all_reduce(max_T, dist.ReduceOp.MAX, group=shard.tp_group)
        _shift(sums_kT, local_max_T - max_T)
        dist.all_reduce(sums_kT, group=shard.tp_group)
    return max_T, sums_kT


def gradients(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    to_logits: Callable[[Tensor, Tensor, slice, slice], Tensor],
    shard: VocabShard,
    weight_grad_VH: Tensor | None,
    needs: tuple[bool, bool],
    *,
    with_spare: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of hidden states (in the dtype of the computation) and of the weight; None if not needed.

    `to_logits(logits [n, v], spare, tokens, columns)` returns the gradient of a tile's logits; `spare` is scratch
    memory of the tile's size with `with_spare`. The weight's gradient is added to `weight_grad_VH` if that is given.
    """
    needs_hidden, needs_weight = needs
    dtype, operands_NH = _compute_dtype(weight_VH), operand(hidden_NH)
    grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=dtype) if needs_hidden else None
    sink_VH = None
    if needs_weight:
        sink_VH = torch.zeros_like(weight_VH) if weight_grad_VH is None else weight_grad_VH
    scratch, spare = shard.scratch(hidden_NH), shard.scratch(hidden_NH) if with_spare else torch.empty(0)
    for columns in shard.column_tiles() if len(hidden_NH) else ():
        weight_vH = operand(weight_VH[columns])
        sink_vH = None if sink_VH is None else sink_VH[columns]
        sum_vH = sink_vH if sink_vH is None or sink_vH.dtype == dtype else torch.zeros_like(sink_vH, dtype=dtype)
        for tokens in shard.token_tiles(len(hidden_NH)):
            x_nv = shard.logits(operands_NH[tokens], weight_vH, scratch)
            grad_nv = to_logits(x_nv, spare, tokens, columns).to(weight_vH.dtype)
            if grad_hidden_NH is not None:
                _add_product(grad_hidden_NH[tokens], grad_nv, weight_vH)
            if sum_vH is not None:
                _add_product(sum_vH, grad_nv.t(), operands_NH[tokens])
        if sink_vH is not None and sum_vH is not None and sum_vH is not sink_vH:
            sink_vH += sum_vH
    return grad_hidden_NH, sink_VH if weight_grad_VH is None else None


def exp_sum(x_nv: Tensor, max_n: Tensor) -> Tensor:
    """Return the sums [n] of e^(x - max). x is overwritten."""
    return x_nv.sub_(max_n[:, None]).exp_().sum(dim=1)


def times_exp(x_nv: Tensor, max_n: Tensor, factor_n1: Tensor) -> Tensor:
    """Return factor e^(x - max) in place of x."""
    return x_nv.sub_(max_n[:, None]).exp_().mul_(factor_n1)


def _shift(sums_kT: Tensor, delta_T: Tensor) -> None:
    """Convert the sums over y = x - old max to a new max, in place; delta_T = old - new <= 0."""
    delta_T = delta_T.clamp(min=LOG_ZERO)
    if sums_kT.shape[0] == 3:
        sums_kT[2].add_(delta_T * sums_kT[1])
    sums_kT[1:].mul_(delta_T.exp())


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1.0, alpha: float = 1.0) -> None:
    """Compute out = beta out + alpha a @ b, in place. On a GPU sums and `out` may be float32 while a and b are
    bfloat16.
    """
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)


def operand(x: Tensor) -> Tensor:
    """Return the operand of matrix products: a GPU multiplies bfloat16 with float32 sums; on a CPU only float32 is
    fast.
    """
    return x if x.is_cuda else x.to(_compute_dtype(x))


def _tile_of(scratch: Tensor, num_tokens: int, num_columns: int) -> Tensor:
    return scratch[: num_tokens * num_columns].view(num_tokens, num_columns)


def _slices(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
